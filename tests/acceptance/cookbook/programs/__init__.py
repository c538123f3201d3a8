"""Programs that run in the cookbook's own environment, which has none of our packages."""

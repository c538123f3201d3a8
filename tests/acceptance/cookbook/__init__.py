"""tinker-cookbook, unchanged, as a user of a live server: its recipes, loggers and evaluations."""

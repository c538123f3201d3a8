"""A draft's weights and the ranks that share them, and the versions of its target."""

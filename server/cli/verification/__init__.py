"""The checks of `trainhouse verify`: each yields the problems that it finds."""

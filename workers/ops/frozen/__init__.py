"""Frozen weights in fewer bits than their products take."""

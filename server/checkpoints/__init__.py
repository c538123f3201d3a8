"""Checkpoints: their names, files, copies and imports."""

"""Names, files, copies and imports of checkpoints."""

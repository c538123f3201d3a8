"""Validates operations and packs them into micro-batches."""

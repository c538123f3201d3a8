"""Formats of packed weights, a file each: rows that the core reads them by, and runs without."""

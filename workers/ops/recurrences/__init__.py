"""Recurrences over packed rows, one kind per file: see ../recurrence.py."""

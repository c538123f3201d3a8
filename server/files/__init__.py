"""Append-only logs, directories that are complete or absent, and object stores."""

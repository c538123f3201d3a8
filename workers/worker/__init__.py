"""Runs one rank, in a process of its own."""

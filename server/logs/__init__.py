"""Logging of a server process."""

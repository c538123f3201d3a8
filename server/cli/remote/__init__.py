"""Implements the commands that work through a running server, with an API key."""

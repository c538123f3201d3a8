"""Runs one server process: assembles its parts, claims its state, opens its socket, and stops it."""

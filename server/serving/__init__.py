"""Runs one server process: assembles its parts, takes its state, opens its socket, and stops it."""

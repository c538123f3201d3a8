"""Starts, calls and restarts the ranks of a group, and gives groups turns on shared devices."""

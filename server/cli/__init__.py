"""Implements the commands of `trainhouse`."""

"""Runs one rank."""

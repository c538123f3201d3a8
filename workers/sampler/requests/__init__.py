"""Sampling requests under way."""

"""Runs ranks as actors of a Ray cluster."""

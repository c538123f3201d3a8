"""Metrics of a running server, for operators."""

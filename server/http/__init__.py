"""Requests before they are decoded: limits, bodies, decoding."""

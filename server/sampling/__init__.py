"""Samplers, and the requests to them."""

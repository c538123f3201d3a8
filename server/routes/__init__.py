"""Defines the HTTP routes, one module per tag of the API."""

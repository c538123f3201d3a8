"""Reads request bodies within limits and decodes them."""

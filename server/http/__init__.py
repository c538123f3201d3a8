"""Reads request bodies within limits, decodes them, and turns errors into responses."""

"""The knobs of a server."""

"""Compute. Knows nothing of HTTP and never imports the server."""

"""Log lines of a server."""

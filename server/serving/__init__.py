"""One server process: its parts put together, its claim, its socket, its end."""

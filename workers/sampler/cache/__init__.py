"""Keys and values of sequences."""

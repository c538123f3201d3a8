"""Captured features (stored hidden states for draft training): stored, counted, released."""

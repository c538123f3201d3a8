"""Attention to the tokens that an indexer chooses."""

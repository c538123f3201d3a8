"""Chooses tokens from logits, and verifies draft tokens."""

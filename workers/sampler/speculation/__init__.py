"""Speculative decoding: what drafts propose, whether it pays, and how the model's pass accepts it."""

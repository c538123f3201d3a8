"""Owns samplers (weights that can be sampled), their drafts, and the requests to them."""

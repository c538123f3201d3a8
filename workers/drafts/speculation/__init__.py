"""Speculative decoding with drafts: their caches, their proposals, and when drafting pays."""

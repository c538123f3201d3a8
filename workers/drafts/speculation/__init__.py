"""Drafts that speculate for the sampler: their caches, what they propose, and whether it pays."""

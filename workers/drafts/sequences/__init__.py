"""Sequences for draft training and drafting, and attention over them."""

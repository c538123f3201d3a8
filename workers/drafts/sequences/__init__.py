"""The sequences that drafts learn from, and attention over them."""

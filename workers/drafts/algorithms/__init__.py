"""The modules of drafts and their algorithms."""

"""How drafts learn of a micro-batch, and what they are judged by."""

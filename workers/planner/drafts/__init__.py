"""Plans the memory of ranks that train drafts. Imports no torch."""

"""What was captured of the targets of drafts: kept, counted, released."""

"""Training of drafts: division over ranks, captured features of the target, and acceptance length."""

"""Draft algorithms (EAGLE-3, DFlash) and the modules that their drafts are made of."""

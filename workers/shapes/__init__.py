"""What a model's config.json decides of its weights, and how they are shared out. Imports no torch."""

"""The shapes of models as read from config.json, and how ranks divide their weights."""

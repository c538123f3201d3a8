"""Writes chats by a model's chat template: prompts of the chat endpoint and rows for training, by the same code."""

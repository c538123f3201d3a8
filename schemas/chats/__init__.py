"""OpenAI's chat and completion messages, and chats by a model's template: prompts and rows for training alike."""

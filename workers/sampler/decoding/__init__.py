"""The packed batch of a forward pass, decode steps and logits processors."""

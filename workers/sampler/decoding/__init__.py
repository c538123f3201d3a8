"""The packed batch of a forward pass, recorded decode steps and logits processors."""

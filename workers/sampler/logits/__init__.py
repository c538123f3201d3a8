"""How a token is chosen by its logits."""

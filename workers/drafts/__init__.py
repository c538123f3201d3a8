"""Draft models for speculative decoding: small models that propose tokens for their target, a base model with or
without trained weights."""

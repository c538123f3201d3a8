"""Draft models for speculative decoding: small models that guess what their target, a base model, will say."""

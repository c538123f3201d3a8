"""The KV cache of sampled sequences, and its prefix cache."""

"""The native sampler: continuous batching, the KV cache, prefix caching and speculative decoding."""

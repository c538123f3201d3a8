"""Sampling by vLLM servers."""

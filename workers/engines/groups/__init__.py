"""Sampler groups: workers that only sample, with copies of adapters."""

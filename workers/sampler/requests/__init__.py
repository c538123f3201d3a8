"""Sampling requests in flight: their sequences, prompt scores and stop conditions."""

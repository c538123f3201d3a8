"""Sampling engines by name."""

from .native import NativeSampler

SAMPLERS = {"native": NativeSampler}

"""Sampling engines by name."""

from .multi_model import InTurn

SAMPLERS = {"native": InTurn}

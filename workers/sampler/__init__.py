"""Sampling engines by name."""

from .in_turn import InTurn

SAMPLERS = {"native": InTurn}

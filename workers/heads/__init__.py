"""Heads, one per file: they compute scores from final hidden states (see head.py)."""

from .head import Head, HeadPass
from .logprobs import LogprobHead
from .value_head import ValueHead

HEADS = {"logprobs": LogprobHead, "values": ValueHead}

__all__ = ["HEADS", "Head", "HeadPass", "LogprobHead", "ValueHead"]

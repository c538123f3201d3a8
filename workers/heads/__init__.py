"""What last hidden states are scored by, one a file: see head.py."""

from .head import Head, HeadPass
from .logprobs import LogprobHead
from .values import ValueHead

HEADS = {"logprobs": LogprobHead, "values": ValueHead}

__all__ = ["HEADS", "Head", "HeadPass", "LogprobHead", "ValueHead"]

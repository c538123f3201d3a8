"""The growth of queries with their positions."""

from dataclasses import dataclass


@dataclass(frozen=True)
class QueryGrowth:
    """Multiplies queries by 1 + rate * log(1 + floor((position + first) / length))."""

    rate: float
    length: int
    first: int = 0

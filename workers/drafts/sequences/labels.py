"""Labels: what a draft is to guess, and how much that counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

Options = Mapping[str, float | str]
"""Of a loss, by name."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Of n tokens: targets int64 [n], the tokens behind them; weights float32 [n], of these. numbers: of the sequences,
    in their operation."""

    targets: Tensor
    weights: Tensor
    numbers: Sequence[int]

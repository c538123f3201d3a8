"""The tokens that a draft learns to predict, and their weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

Options = Mapping[str, float | str]
"""Options of a loss, by name."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Targets and weights of n tokens.

    targets: int64 [n], the token after each. weights: float32 [n], those of the targets.
    datum_indices: of the sequences, in their operation.
    """

    targets: Tensor
    weights: Tensor
    datum_indices: Sequence[int]

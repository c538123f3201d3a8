"""Several linear layers of one input as one product, where that is faster."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# With more tokens than this a merged product is no faster on the CPU, and its parts, strided views, are slower to read.
_MAX_MERGED_TOKENS = 256

# Makes one linear layer of several of the same input; `out_features` of the result says how to split its output.
Merge = Callable[[Sequence[Any]], Any]


class MergedProjection:
    """Holds linear layers merged into one, once they are, and decides when to use it."""

    def __init__(self) -> None:
        self._merged: Any = None
        self._is_current = True

    def merge(self, merge: Merge, linears: Sequence[Any]) -> None:
        self._merged = merge(linears)

    def refresh(self, are_original: bool) -> None:
        """Updates whether the merged weights are those of the parameters."""
        self._is_current = are_original

    @property
    def out_features(self) -> tuple[int, ...]:
        """The output features of each linear layer, or of each part of one that adapters adapt."""
        return self._merged.out_features

    def suits(self, x: Tensor) -> bool:
        """True if the merged product should run for x [tokens, in]."""
        if self._merged is None or not self._is_current or torch.is_grad_enabled():
            return False
        return not x.is_cpu or x.shape[0] <= _MAX_MERGED_TOKENS

    def forward(self, x: Tensor) -> Tensor:
        """Returns the concatenated outputs of all layers."""
        return self._merged(x)

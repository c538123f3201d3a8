"""Features: what a draft model is told of its target, for the packed sequences of a micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..attention import Packing

# float32 [m, vocabulary] of the target, for a slice of m of its tokens.
Logits = Callable[[slice], Tensor]


@dataclass(frozen=True, eq=False)
class Features:
    """Of n tokens. positions: int64 [n], which restart with each sequence. embedded: [n, hidden], what goes into the
    target's first layer. captured: [n, layers * hidden], outputs of the layers that the draft reads, side by side.
    logits: the target's of what comes behind some of the tokens.
    """

    positions: Tensor
    packing: Packing
    embedded: Tensor
    captured: Tensor
    logits: Logits

"""Features: what a draft model is told of its target, for the packed sequences of a micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...ops.attention import Packing
from .stretch import Stretch

# float32 [m, vocabulary] of the target, for m of its tokens, int64 [m].
Logits = Callable[[Tensor], Tensor]


class TargetHead(Protocol):
    """The target's output head, which is frozen, for what a draft would have it read."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden], in place of the target's last ones -> float32 at least [m, vocabulary]. The caller bounds
        m."""
        ...

    def backward(self, gradient: Tensor) -> Tensor:
        """gradient: by the logits that were given last. Returns the one by what they were made of, [m, hidden]."""
        ...


@dataclass(frozen=True, eq=False)
class Features:
    """Of n tokens. positions: int64 [n], which restart with each sequence. embedded: [n, hidden], what goes into the
    target's first layer. captured: [n, layers * hidden], outputs of the layers that the draft reads, side by side.
    logits: the target's of what comes behind some of the tokens. mask: [hidden], as embedded, of the draft's mask
    token, if it has one. head: for drafts that have none.

    stretch: where ranks share out the n tokens. Then embedded, captured and logits are of this rank's, and those behind
    them, as far as the draft looks ahead.
    """

    positions: Tensor
    packing: Packing
    embedded: Tensor
    captured: Tensor
    logits: Logits
    mask: Tensor | None = None
    head: TargetHead | None = None
    stretch: Stretch | None = None

    @property
    def shared(self) -> Stretch:
        return self.stretch or Stretch(len(self.positions))

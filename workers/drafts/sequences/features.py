"""Inputs of a draft's training for the packed sequences of a micro-batch: the tokens that it learns to predict, and the
target's hidden states and outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...ops.attention import Packing
from .sequence_shard import SequenceShard
from .target_form import TargetDistribution

# Computes the target's distribution at m of its tokens, int64 [m].
Distribution = Callable[[Tensor], TargetDistribution]


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


class TargetHead(Protocol):
    """The target's output head, which is frozen, applied to hidden states of a draft."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits of final hidden states, [m, hidden] -> at least float32, [m, vocabulary]."""
        ...

    def backward(self, gradient: Tensor) -> Tensor:
        """Backpropagates the gradient of the last logits to the hidden states, [m, hidden]."""
        ...


@dataclass(frozen=True, eq=False)
class DraftInputs:
    """Inputs of a draft's training pass over n tokens.

    positions: int64 [n], restarting with each sequence. embedded: [n, hidden], the input of the target's first layer.
    captured: [n, layers * hidden], outputs of the captured layers, concatenated.
    distribution: computes the target's distribution of the token after each of the given tokens.
    shard: this rank's shard of the n tokens. Where ranks share them, embedded, captured and distribution cover only the
    shard, and the tokens after it as far as the draft looks ahead.
    mask: [hidden], the embedding of the draft's mask token, if it has one. head: for drafts without an output head.
    """

    positions: Tensor
    packing: Packing
    embedded: Tensor
    captured: Tensor
    distribution: Distribution
    shard: SequenceShard
    mask: Tensor | None = None
    head: TargetHead | None = None

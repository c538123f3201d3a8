"""Counts the operations that passes need, from what the parts of layers say. Imports no torch.

A multiplication and its addition are two. Only products count, not padding, nor scores that attention masks.
`ModelFlops` counts each as often as the model needs it.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ...protocol.parallel_spec import SINGLE, ParallelSpec
from ..model_shape import ModelShape
from ..parts import Flops, IndexFlops, View

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class OwnFlops:
    """The operations that a run's model adds to those of its base in a forward pass, for each token, by products with
    matrices that it trains.

    trunk, head: before and after the last hidden state. trains_base: whether it trains the base's weights, too.
    has_logits: whether it uses the output head of the base.
    """

    trunk: float = 0.0
    head: float = 0.0
    trains_base: bool = False
    has_logits: bool = True


class ModelFlops:
    """Counts for the sequences of one base model, from constants that are summed over its layers once."""

    def __init__(self, shape: ModelShape, spec: ParallelSpec = SINGLE) -> None:
        """spec: counts what one of its ranks along tp computes of these sequences."""
        beside = (size for name, size in shape.other_weights.items() if not name.startswith("embed"))
        self._head = 2.0 * shape.vocab * shape.hidden / spec.tp
        self._weights = 2.0 * sum(prod(size) for size in beside if len(size) > 1) / spec.tp
        self._states = 0.0
        self._scores: defaultdict[View, float] = defaultdict(float)
        self._indices: Counter[IndexFlops] = Counter()
        for layer, number in Counter(shape.layers).items():
            for each in layer.flops(spec):
                self._add(each, number)

    def _add(self, flops: Flops, number: int) -> None:
        self._weights += number * flops.weights
        self._states += number * flops.states
        if flops.scores:
            self._scores[flops.view] += number * flops.scores
        if flops.index is not None:
            self._indices[flops.index] += number

    def of_pass(self, lengths: "np.ndarray", own: OwnFlops, num_trained: int | None = None) -> float:
        """Returns the operations of a forward pass that scores all tokens, and of a backward pass.

        Args:
            lengths: of sequences, int64 [n].
            num_trained: tokens whose scores have a gradient; None for no backward pass.
        """
        num_tokens, attention = int(lengths.sum()), self._attention(lengths)
        of_token = self._weights + self._states + own.trunk
        forward = num_tokens * of_token + attention + self._choice(lengths) + self.head(num_tokens, own)
        if num_trained is None:
            return forward
        # Of products with frozen weights only the inputs have gradients.
        num_frozen = 0 if own.trains_base else 1
        of_head = 2.0 * own.head + ((2 - num_frozen) * self._head if own.has_logits else 0.0)
        if not (own.trunk or own.trains_base):
            return forward + num_trained * of_head
        of_token = 2.0 * of_token - num_frozen * self._weights
        return forward + num_tokens * of_token + 2.0 * attention + num_trained * of_head

    def trunk(self, lengths: "np.ndarray") -> float:
        """Returns the operations of the base up to the last hidden states of these sequences."""
        of_tokens = int(lengths.sum()) * (self._weights + self._states)
        return of_tokens + self._attention(lengths) + self._choice(lengths)

    def head(self, num_scored: int, own: OwnFlops) -> float:
        return num_scored * (own.head + (self._head if own.has_logits else 0.0))

    def _attention(self, lengths: "np.ndarray") -> float:
        return sum(scores * num_pairs(view, lengths) for view, scores in self._scores.items())

    def _choice(self, lengths: "np.ndarray") -> float:
        """Returns the operations of indexers, which sequences have that are longer than what they choose."""
        found = 0.0
        for index, number in self._indices.items():
            longer = lengths[lengths > index.most]
            found += number * (int(longer.sum()) * index.tokens + num_pairs(View(), longer) * index.pairs)
        return found


def num_pairs(view: View, lengths: "np.ndarray") -> int:
    """Returns the pairs of a token and one that it attends to, over all sequences of these lengths, int64 [n]."""
    if view.part_size is not None:
        rest = lengths % view.part_size
        whole = int((lengths - rest).sum()) * (view.part_size + 1)
        return (whole + int(rest @ (rest + 1))) // 2
    if view.window is None:
        return int(lengths @ (lengths + 1)) // 2
    seen = lengths.clip(max=view.window)
    return int(seen @ (2 * lengths - seen + 1)) // 2

"""Blocks: what a block-drafting model guesses at once: a token that is known, its anchor, and some behind it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...ops.attention import Packing
from .labels import Labels, Options

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Span:
    """Blocks of one sequence, one after the other, and the tokens of which each of them sees some."""

    blocks: slice
    context: slice


@dataclass(frozen=True, eq=False)
class Blocks:
    """m blocks of `size` tokens. anchors: int64 [m], where their first ones are among n packed tokens, ascending;
    known_anchors: the same, where no device is waited for. stops: int64 [m], where their sequences end. spans: by
    sequence, all blocks in order."""

    anchors: Tensor
    known_anchors: Sequence[int]
    stops: Tensor
    size: int
    spans: Sequence[Span]

    @staticmethod
    def drawn(packing: Packing, labels: Labels, options: Options, size: int) -> "Blocks":
        """Of each sequence up to options["num_anchors"], by options["seed"]."""
        weights = labels.weights.cpu().numpy()
        anchors: list[int] = []
        stops: list[int] = []
        spans: list[Span] = []
        for number, tokens in zip(labels.numbers, _sequences(packing), strict=True):
            lots = Lots(int(options["seed"]), number)
            found = (tokens.start + drawn_anchors(weights[tokens], lots, int(options["num_anchors"]))).tolist()
            if found:
                blocks = slice(len(anchors), len(anchors) + len(found))
                spans.append(Span(blocks, slice(tokens.start, found[-1])))
                anchors += found
                stops += [tokens.stop] * len(found)
        on_device = torch.tensor([anchors, stops], dtype=torch.int64, device=labels.weights.device)
        return Blocks(on_device[0], anchors, on_device[1], size, spans)

    def some(self, chosen: slice) -> "Blocks":
        """Those of these numbers."""
        if chosen == slice(0, None, 1):
            return self
        numbers = range(len(self.known_anchors))[chosen]
        known, spans, first = self.known_anchors[chosen], [], 0
        for span in self.spans:
            count = sum(span.blocks.start <= number < span.blocks.stop for number in numbers)
            if count:
                spans.append(Span(slice(first, first + count), slice(span.context.start, known[first + count - 1])))
                first += count
        return Blocks(self.anchors[chosen], known, self.stops[chosen], self.size, spans)

    def places(self) -> Tensor:
        """int64 [m, size - 1]: behind which tokens the guesses stand; the anchor where there is no such token."""
        behind = self._behind()
        return torch.where(self.exists(), behind, self.anchors[:, None])

    def exists(self) -> Tensor:
        """bool [m, size - 1]: whether the sequence goes on so far."""
        return self._behind() < self.stops[:, None]

    def _behind(self) -> Tensor:
        """Position k of a block is what stands behind token k - 1 from its anchor."""
        return self.anchors[:, None] + torch.arange(self.size - 1, device=self.anchors.device)


@dataclass(frozen=True)
class Lots:
    """What chance gives each token of a sequence, by the seed, the sequence's number and the token's place alone.

    The generator is Philox, which counts (Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011)).
    """

    seed: int
    number: int

    def drawn(self, num_tokens: int) -> np.ndarray:
        """uint64 [num_tokens]; of fewer the same ones."""
        key = np.array([self.seed & _MASK, self.number & _MASK], dtype=np.uint64)
        return np.random.Philox(key=key).random_raw(num_tokens)


def drawn_anchors(weights: np.ndarray, lots: Lots, num_anchors: int) -> np.ndarray:
    """Of a sequence's tokens, ascending, those whose next one has a weight; of more than num_anchors a random choice
    without replacement. What else is in the batch changes nothing."""
    candidates = np.flatnonzero(weights)
    order = np.argsort(lots.drawn(len(weights))[candidates], kind="stable")
    return np.sort(candidates[order[:num_anchors]])


def _sequences(packing: Packing) -> Iterator[slice]:
    for group in packing.groups:
        for number in range(group.count):
            start = group.start + number * group.length
            yield slice(start, start + group.length)

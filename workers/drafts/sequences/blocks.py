"""The blocks that a block-drafting model predicts in parallel: an anchor, which is a token of the text, and the tokens
after it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...ops.attention import Packing
from .features import Labels, Options

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Span:
    """Consecutive blocks of one sequence, and the range of context tokens that they see at least partly."""

    blocks: slice
    context: slice


@dataclass(frozen=True, eq=False)
class Blocks:
    """m blocks of `size` tokens, sampled from packed sequences.

    anchors: int64 [m], positions of the anchors among n packed tokens, ascending.
    host_anchors: the same numbers on the host, which can be read without waiting for the device.
    stops: int64 [m], the ends of the blocks' sequences. spans: one for each sequence, covering all blocks in order.
    """

    anchors: Tensor
    host_anchors: Sequence[int]
    stops: Tensor
    size: int
    spans: Sequence[Span]

    @staticmethod
    def sampled(packing: Packing, labels: Labels, options: Options, size: int) -> "Blocks":
        """Samples up to options["num_anchors"] blocks from each sequence, seeded by options["seed"]."""
        weights = labels.weights.cpu().numpy()
        anchors: list[int] = []
        stops: list[int] = []
        spans: list[Span] = []
        for number, tokens in zip(labels.datum_indices, _sequences(packing), strict=True):
            random = TokenRandom(int(options["seed"]), number)
            sampled = sample_anchors(weights[tokens], random, int(options["num_anchors"]))
            if len(sampled):
                blocks = slice(len(anchors), len(anchors) + len(sampled))
                anchors += (tokens.start + sampled).tolist()
                stops += [tokens.stop] * len(sampled)
                spans.append(Span(blocks, slice(tokens.start, anchors[-1])))
        on_device = torch.tensor([anchors, stops], dtype=torch.int64, device=labels.weights.device)
        return Blocks(on_device[0], anchors, on_device[1], size, spans)

    def select(self, chosen: slice) -> "Blocks":
        """Returns the blocks with these indices."""
        if chosen == slice(0, None, 1):
            return self
        numbers = range(len(self.host_anchors))[chosen]
        anchors, spans, first = self.host_anchors[chosen], [], 0
        for span in self.spans:
            count = sum(span.blocks.start <= number < span.blocks.stop for number in numbers)
            if count:
                spans.append(Span(slice(first, first + count), slice(span.context.start, anchors[first + count - 1])))
                first += count
        return Blocks(self.anchors[chosen], anchors, self.stops[chosen], self.size, spans)

    def label_indices(self) -> Tensor:
        """Returns the index of each predicted token's label, int64 [m, size - 1]; the anchor beyond the sequence."""
        return torch.where(self.exists(), self._unbounded_indices(), self.anchors[:, None])

    def exists(self) -> Tensor:
        """Returns bool [m, size - 1]: True where the sequence is long enough."""
        return self._unbounded_indices() < self.stops[:, None]

    def _unbounded_indices(self) -> Tensor:
        """Returns the indices as if no sequence ended. The label of token k of a block is at its anchor + k - 1."""
        return self.anchors[:, None] + torch.arange(self.size - 1, device=self.anchors.device)


@dataclass(frozen=True)
class TokenRandom:
    """Random numbers for the tokens of a sequence, which depend on the seed, the sequence's number and the token's
    position only.

    The generator is Philox, which is counter-based (Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011)).
    """

    seed: int
    number: int

    def drawn(self, num_tokens: int) -> np.ndarray:
        """Returns uint64 [num_tokens]. A shorter sequence gets a prefix of the same numbers."""
        key = np.array([self.seed & _MASK, self.number & _MASK], dtype=np.uint64)
        return np.random.Philox(key=key).random_raw(num_tokens)


def sample_anchors(weights: np.ndarray, random: TokenRandom, num_anchors: int) -> np.ndarray:
    """Returns the tokens whose next one has a weight, ascending; if these are more than num_anchors, a random choice
    without replacement.

    The result does not depend on the rest of the batch.
    """
    candidates = np.flatnonzero(weights)
    order = np.argsort(random.drawn(len(weights))[candidates], kind="stable")
    return np.sort(candidates[order[:num_anchors]])


def _sequences(packing: Packing) -> Iterator[slice]:
    for group in packing.groups:
        for number in range(group.count):
            start = group.start + number * group.length
            yield slice(start, start + group.length)

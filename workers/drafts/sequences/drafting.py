"""Drafting while sampling: the inputs that a draft gets from its target, and how far it looks ahead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...ops.kv_cache import ContinuationChunk

Draw = Callable[[Tensor], Tensor]
"""Draws the next draft token of m sequences, logits [m, vocabulary of the draft] -> int64 [m]."""


@dataclass(frozen=True)
class DraftLengths:
    """The number of tokens that a draft proposes at a time.

    default: used if a request sets no number. most: the limit.
    block: tokens that a block draft processes to propose all of them in parallel; None = tokens are proposed one after
    the other.
    """

    default: int
    most: int
    block: int | None = None

    def num_passes(self, num_draft_tokens: float) -> float:
        return num_draft_tokens if self.block is None else 1

    def num_ahead(self, num_draft_tokens: int) -> int:
        """Returns the draft tokens that the draft's KV cache holds temporarily while drafting."""
        return num_draft_tokens - 1 if self.block is None else self.block


@dataclass(frozen=True, eq=False)
class TargetStates:
    """The target's features at n tokens of m sequences, concatenated, at least one token of each.

    captured: [n, layers * hidden]. next_tokens: int64 [n], the token after each.
    chunks: for each sequence, where its tokens go in the draft's KV cache, after all earlier ones.
    """

    captured: Tensor
    next_tokens: Tensor
    chunks: Sequence[ContinuationChunk]

    def positions(self) -> Tensor:
        parts = [np.arange(each.cached, _stop(each)) for each in self.chunks]
        return torch.from_numpy(np.concatenate(parts)).to(self.next_tokens.device)

    def last(self) -> Tensor:
        """Returns the index of each sequence's last token, int64 [m]."""
        return torch.tensor([each.stop - 1 for each in self.chunks], device=self.next_tokens.device)

    def scratch_chunks(self, num_tokens: int, skipped: int = 0, is_causal: bool = True) -> list[ContinuationChunk]:
        """Returns the cache chunks for `num_tokens` draft tokens of each sequence, after `skipped` others.

        The tokens are packed sequence by sequence. The next tokens that the target verifies overwrite them. `is_causal`
        is that of ContinuationChunk.
        """
        starts = range(0, num_tokens * len(self.chunks), num_tokens)
        return [
            ContinuationChunk(start, start + num_tokens, each.tensors, each.slot, _stop(each) + skipped, is_causal)
            for start, each in zip(starts, self.chunks, strict=True)
        ]


class TargetEnds(Protocol):
    """The first and last layer of the target that is sampled from."""

    def embedded(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings, int64 [n] -> [n, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the target's logits of final hidden states, [m, k, hidden] -> float32 [m, k, vocabulary]."""
        ...


def _stop(chunk: ContinuationChunk) -> int:
    return chunk.cached + chunk.stop - chunk.start

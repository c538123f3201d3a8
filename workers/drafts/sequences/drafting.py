"""Drafting: how a draft guesses samples under way: what it is told of its target, and how far it looks ahead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...ops.kv_cache import Chunk

Draw = Callable[[Tensor], Tensor]
"""The next guess of m sequences: logits [m, vocabulary of the draft] -> the tokens that are drawn, int64 [m]."""


@dataclass(frozen=True)
class Reach:
    """How many tokens a draft guesses at a time: usual: where nobody says how many; most. block: tokens that it runs to
    make all of these at once; None = it makes one after the other."""

    usual: int
    most: int
    block: int | None = None

    def num_passes(self, num_guesses: float) -> float:
        """Of the draft."""
        return num_guesses if self.block is None else 1

    def num_ahead(self, num_guesses: int) -> int:
        """Tokens that its cache has meanwhile behind those that it was told of."""
        return num_guesses - 1 if self.block is None else self.block


@dataclass(frozen=True, eq=False)
class Told:
    """What the target had at n tokens of m sequences, one sequence's after the other's, at least one of each.

    captured: [n, layers * hidden]. following: int64 [n], the tokens behind these. chunks: of each sequence, where these
    are stored, behind all that it was told of before.
    """

    captured: Tensor
    following: Tensor
    chunks: Sequence[Chunk]

    def positions(self) -> Tensor:
        """int64 [n]"""
        parts = [np.arange(each.cached, _stop(each)) for each in self.chunks]
        return torch.from_numpy(np.concatenate(parts)).to(self.following.device)

    def last(self) -> Tensor:
        """int64 [m]: which of the n tokens is each sequence's last."""
        return torch.tensor([each.stop - 1 for each in self.chunks], device=self.following.device)

    def ahead(self, num_tokens: int, skipped: int = 0, is_causal: bool = True) -> list[Chunk]:
        """Where so many more of each sequence go, side by side, behind `skipped` others. What is told later overwrites
        them. is_causal: see Chunk."""
        starts = range(0, num_tokens * len(self.chunks), num_tokens)
        return [
            Chunk(start, start + num_tokens, each.shelf, each.slot, _stop(each) + skipped, is_causal)
            for start, each in zip(starts, self.chunks, strict=True)
        ]


class Ends(Protocol):
    """The target's first and last layer, as it is sampled."""

    def embedded(self, tokens: Tensor) -> Tensor:
        """int64 [n] -> [n, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, k, hidden], in place of its last ones, of the m sequences -> float32 [m, k, vocabulary]."""
        ...


def _stop(chunk: Chunk) -> int:
    """Tokens of its sequence, with its own."""
    return chunk.cached + chunk.stop - chunk.start

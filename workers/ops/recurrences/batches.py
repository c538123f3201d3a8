"""Lays a packed row out as batches of sequences of similar length, for kernels that take batches."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..attention import Packing


class Batches:
    """Divides the sequences of a packed row into batches, and fills shorter ones up with zeros.

    A sequence has at least half the tokens of the longest one of its batch, so that at most half of them are filled up.

    shapes: sequences and tokens of each batch.
    """

    def __init__(self, packing: Packing, device: torch.device, _size: int) -> None:
        lengths, members = packing.lengths, _divided(packing.lengths)
        self.shapes = [(len(own), lengths[own[0]]) for own in members]
        self._sizes = [count * longest for count, longest in self.shapes]
        order = [i for own in members for i in own]
        self._order = torch.tensor(order, device=device)
        self._ranks = self._order.argsort()
        starts = dict(zip(order, accumulate((s for n, s in self.shapes for _ in range(n)), initial=0), strict=False))
        places = torch.cat([torch.arange(starts[i], starts[i] + length) for i, length in enumerate(lengths)])
        is_row = sum(self._sizes) == len(places) and order == sorted(order)
        self._places = None if is_row else places.to(device)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Maps x [tokens, ...] to batches [sequences, tokens, ...]."""
        if self._places is not None:
            x = x.new_zeros(sum(self._sizes), *x.shape[1:]).index_copy_(0, self._places, x)
        return [own.unflatten(0, shape) for own, shape in zip(x.split(self._sizes), self.shapes, strict=True)]

    def join(self, batches: Sequence[Tensor]) -> Tensor:
        """Maps batches [sequences, tokens, ...] to [tokens, ...]."""
        x = torch.cat([own.flatten(0, 1) for own in batches])
        return x if self._places is None else x.index_select(0, self._places)

    def split_states(self, states: Tensor) -> Sequence[Tensor]:
        """Maps states [sequences, ...] of the row to those of each batch."""
        return states.index_select(0, self._order).split([count for count, _ in self.shapes])

    def join_states(self, batches: Sequence[Tensor]) -> Tensor:
        """Maps states of each batch, [sequences, ...], to those of the row."""
        return torch.cat(list(batches)).index_select(0, self._ranks)


def _divided(lengths: Sequence[int]) -> list[list[int]]:
    """Returns the indices of the sequences of each batch, the longest ones first."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or 2 * lengths[i] < lengths[batches[-1][0]]:
            batches.append([])
        batches[-1].append(i)
    return batches

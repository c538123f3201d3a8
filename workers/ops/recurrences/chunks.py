"""Lays a packed row out in chunks of equal size, so that a recurrence computes all sequences as batches.

Within a chunk all work is batched over all chunks; from chunk to chunk the states of all sequences advance together.
"""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..attention import Packing


class Chunks:
    """Cuts each sequence of a packed row into chunks of `size` tokens, and fills up the last one.

    The first chunks of all sequences precede all second chunks, and so on; sequences with more chunks precede those
    with fewer. So the chunks of a step belong to the first sequences of `order`.

    order: the index in the packing of each sequence, int64 [sequences]. ranks: its inverse. steps: the chunks of each
    step. fill: True at tokens that fill up, bool [chunks, 1, size, 1]; None if there are none.
    """

    def __init__(self, packing: Packing, device: torch.device, size: int) -> None:
        self.size = size
        lengths = packing.lengths
        counts = [-(-length // size) for length in lengths]
        self.order = torch.tensor(sorted(range(len(lengths)), key=lambda i: -counts[i]), device=device)
        self.ranks = self.order.argsort()
        active = [sum(count > step for count in counts) for step in range(max(counts))]
        bounds = [0, *accumulate(active)]
        self.steps = [slice(*pair) for pair in pairwise(bounds)]
        sequences = packing.bounds(device)[self.order].long(), packing.bounds(device)[1:][self.order].long()
        self._lay_out(*sequences, active, packing.num_tokens)

    def _lay_out(self, starts: Tensor, ends: Tensor, active: list[int], num_tokens: int) -> None:
        first = torch.cat([starts[:count] + step * self.size for step, count in enumerate(active)])
        end = torch.cat([ends[:count] for count in active]).unsqueeze(1)
        tokens = first.unsqueeze(1) + torch.arange(self.size, device=starts.device)
        inside = tokens < end
        self.fill = None if bool(inside.all()) else inside.logical_not()[:, None, :, None]
        self._places = tokens.new_empty(num_tokens)
        self._places[tokens[inside]] = inside.flatten().nonzero().squeeze(1)
        # A sequence is filled up with its own last token, so that a NaN stays in its sequence.
        self._tokens = torch.minimum(tokens, end - 1)
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    def split(self, x: Tensor) -> Tensor:
        """Maps x [tokens, heads, features] to [chunks, heads, size, features]."""
        rows, _ = self._rows_of(x.shape[1])
        return x.flatten(0, 1).index_select(0, rows).view(-1, x.shape[1], self.size, x.shape[2])

    def join(self, x: Tensor) -> Tensor:
        """Maps x [chunks, heads, size, features], which is contiguous, to [tokens, heads, features]."""
        _, rows = self._rows_of(x.shape[1])
        return x.view(-1, x.shape[3]).index_select(0, rows).view(-1, x.shape[1], x.shape[3])

    def _rows_of(self, num_heads: int) -> tuple[Tensor, Tensor]:
        """Returns the rows of [tokens * heads] that `split` selects, and those of [chunks * heads * size] of `join`."""
        if num_heads not in self._rows:
            heads = torch.arange(num_heads, device=self._tokens.device)
            split = self._tokens.unsqueeze(1) * num_heads + heads.unsqueeze(1)
            chunk, within = self._places // self.size, self._places % self.size
            join = (chunk.unsqueeze(1) * num_heads + heads) * self.size + within.unsqueeze(1)
            self._rows[num_heads] = split.flatten(), join.flatten()
        return self._rows[num_heads]

"""Ring attention: each rank has the queries of one stripe of a row's tokens, and keys and values of all stripes pass
by.

Liu, Zaharia and Abbeel, Ring Attention (2023), https://arxiv.org/abs/2310.01889: keys and values travel from rank to
rank while the product with the previous ones is computed, results are merged by the sums of their softmax, and in the
backward pass the gradients of keys and values travel with them. Brandon et al., Striped Attention (2023),
https://arxiv.org/abs/2311.09431: the tokens of a stripe are one ring size apart, so that under causal attention all
ranks have the same amount of work in each step, for any lengths of the packed sequences.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops.attention import AttentionKind, Packing, pack_lengths
from ..ops.partial_attention import PartialAttention, attend_part, part_gradients
from ..shapes.sequence_split import SequenceSplit
from .mesh import PendingCollective, Team

_KEYS, _GRADIENTS = 0, 1  # tags of the transfers in progress at the same time


@dataclass(frozen=True)
class RingBlock:
    """The pairs of queries of one stripe and keys of another that attend, as packed causal attention.

    queries, keys: the rows of either stripe; each sequence has as many queries as keys, which form a triangle.
    packing: of these rows.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    packing: Packing


class Ring:
    """Computes the attention of one row. What this rank sees of the row is found once for all layers."""

    def __init__(self, packing: Packing, team: Team, split: SequenceSplit) -> None:
        """Prepares the attention. `team` has all ranks along sp, and `packing` describes the whole row."""
        self._team, self._distance = team, split.ulysses
        self.size, self._stripe = split.ring, team.index // split.ulysses
        lengths = np.repeat([group.length for group in packing.groups], [group.count for group in packing.groups])
        self._stops = np.cumsum(lengths)
        self._starts = self._stops - lengths
        self._blocks: dict[int, RingBlock | None] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Returns the output in the query's shape. query is [tokens of the stripe, heads, head_dim], key and value have
        kv_heads."""
        if torch.is_grad_enabled():
            return _RingAttention.apply(query, key, value, self, kind)  # pyright: ignore[reportReturnType]
        return _forward(query, key, value, self, kind).out

    def num_steps(self, kind: AttentionKind) -> int:
        """Returns how many stripes a query sees tokens of: tokens of the stripe `step` before its own are at least
        `step` away."""
        return min(self.size, kind.window or self.size)

    def kind_of_step(self, step: int, kind: AttentionKind) -> AttentionKind:
        """Returns the kind without sinks, which all stripes share, and with its window counted in tokens of the stripe
        that is `step` before this rank's."""
        window = (kind.window - 1 - step) // self.size + 1 if kind.window else None
        return replace(kind, window=window, sinks=None)

    def block(self, step: int, device: torch.device) -> RingBlock | None:
        """Returns the pairs for the stripe that is `step` before this rank's, None if no query sees anything of it."""
        if step not in self._blocks:
            self._blocks[step] = self._new_block((self._stripe - step) % self.size, device)
        return self._blocks[step]

    def pass_on(self, tensor: Tensor, what: int, stripes: int = 1) -> PendingCollective:
        """Starts to send a tensor to the rank whose stripe is `stripes` after this one's."""
        return self._team.start_ring_shift(tensor, stripes * self._distance, what)

    def _new_block(self, other: int, device: torch.device) -> RingBlock | None:
        """Finds the visible keys: a query sees the keys up to its own position.

        In the other stripe, these are the keys with at most the query's index within its sequence. If the sequence
        starts in this stripe before it starts in the other one, the limit is that index minus one.
        """
        queries, end = (self._numbers(bounds, self._stripe) for bounds in (self._starts, self._stops))
        keys = self._numbers(self._starts, other)
        queries = queries + (self._place(keys, other) > self._place(queries, self._stripe))
        lengths = np.maximum(end - queries, 0)
        if not lengths.any():
            return None
        packing = Packing(pack_lengths([int(length) for length in lengths if length]))
        return RingBlock(_rows(queries, lengths, device), _rows(keys, lengths, device), packing)

    def _numbers(self, bounds: np.ndarray, stripe: int) -> np.ndarray:
        """Returns how many tokens of the stripe are before each bound."""
        return -((stripe - bounds) // self.size)

    def _place(self, numbers: np.ndarray, stripe: int) -> np.ndarray:
        """Returns the positions in the whole row of a stripe's tokens."""
        return stripe + self.size * numbers


def _rows(firsts: np.ndarray, lengths: np.ndarray, device: torch.device) -> slice | Tensor:
    """Returns `lengths` rows starting at each of `firsts`, as a slice if they are contiguous."""
    before = np.cumsum(lengths) - lengths
    rows = np.repeat(firsts - before, lengths) + np.arange(lengths.sum())
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, kind: AttentionKind) -> Tensor:
        attended = _forward(query, key, value, ring, kind)
        ctx.save_for_backward(query, key, value, *attended)
        ctx.ring, ctx.kind = ring, kind
        return attended.out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *attended = ctx.saved_tensors
        (grad,), whole, sinks = grads, PartialAttention(*attended), ctx.kind.sinks
        if sinks is not None:
            sinks.add_gradient(grad.transpose(0, 1), whole.out.transpose(0, 1), whole.log_sum_exps.t())
        return *_backward(grad, query, key, value, whole, ctx.ring, ctx.kind), None, None


def _forward(query: Tensor, key: Tensor, value: Tensor, ring: Ring, kind: AttentionKind) -> PartialAttention:
    """Computes the output, accumulating in float32. A query always sees its own token in its own stripe, so all sums
    are finite."""
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    log_sums = torch.full(query.shape[:2], -torch.inf, device=query.device)
    held, steps = torch.stack((key, value)), ring.num_steps(kind)
    for step in range(steps):
        arriving = ring.pass_on(held, _KEYS) if step + 1 < steps else None
        block = ring.block(step, query.device)
        if block is not None:
            keys, values = held[:, block.keys]
            of_block = attend_part(query[block.queries], keys, values, block.packing, ring.kind_of_step(step, kind))
            _join(out, log_sums, block.queries, of_block)
        held = held if arriving is None else arriving.wait()
    if kind.sinks is not None:
        log_sums = kind.sinks.join(out.transpose(0, 1), log_sums.t()).t()
    return PartialAttention(out.to(query.dtype), log_sums)


def _join(out: Tensor, log_sums: Tensor, rows: slice | Tensor, other: PartialAttention) -> None:
    """Merges the result over further keys into that of these rows."""
    before = log_sums[rows]
    joined = torch.logaddexp(before, other.log_sum_exps)
    of_before, of_other = ((sums - joined).exp().unsqueeze(-1) for sums in (before, other.log_sum_exps))
    out[rows] = (out[rows] * of_before).addcmul_(other.out.float(), of_other)
    log_sums[rows] = joined


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: PartialAttention, ring: Ring, kind: AttentionKind
) -> tuple[Tensor, ...]:
    """Computes the gradients. Those of keys and values travel one step behind them, and return to their owner after the
    last step."""
    of_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    held, steps = torch.stack((key, value)), ring.num_steps(kind)
    of_held, arriving_of_held = torch.zeros_like(held, dtype=torch.float32), None
    for step in range(steps):
        arriving = ring.pass_on(held, _KEYS) if step + 1 < steps else None
        block, own = ring.block(step, query.device), None
        if block is not None:
            rows, (keys, values) = block.queries, held[:, block.keys]
            of_whole = PartialAttention(whole.out[rows], whole.log_sum_exps[rows])
            own = part_gradients(
                grad[rows], query[rows], keys, values, of_whole, block.packing, ring.kind_of_step(step, kind)
            )
            of_query[rows] += own.query
        if arriving_of_held is not None:
            of_held = arriving_of_held.wait()
        if block is not None and own is not None:
            of_held[0, block.keys] += own.key
            of_held[1, block.keys] += own.value
        if arriving is not None:
            arriving_of_held, held = ring.pass_on(of_held, _GRADIENTS), arriving.wait()
    if steps > 1:
        of_held = ring.pass_on(of_held, _GRADIENTS, stripes=ring.size - steps + 1).wait()
    return of_query.to(query.dtype), of_held[0].to(key.dtype), of_held[1].to(value.dtype)

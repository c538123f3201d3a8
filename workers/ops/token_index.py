"""The tokens that attention sees, as an indexer chooses them: those of the highest scores among the tokens before.

A score is a weighted sum over the indexer's heads of the positive products of queries with a key. The choice has no
gradient. DeepSeek-V3.2 (2025), section 2.1, https://arxiv.org/abs/2512.02556.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..shapes.parts.windows import queries_of_index
from .attention import AttendingPacking, Packing
from .attention_kind import AttentionKind


@dataclass(frozen=True)
class IndexKind:
    """The indexer of a layer. most: how many tokens it chooses for each."""

    layer: int
    most: int

    @cached_property
    def keys(self) -> AttentionKind:
        """The place of its keys in a cache: under a number that no layer has."""
        return AttentionKind(~self.layer, 1.0, values_are_keys=True)


class IndexQueries(NamedTuple):
    """The search of an indexer. query: [tokens, heads, head_dim]. weights: of heads, float32 [tokens, heads]."""

    query: Tensor
    weights: Tensor

    def rows(self, rows: slice | Tensor) -> "IndexQueries":
        return IndexQueries(self.query[rows], self.weights[rows])


def choose(
    queries: IndexQueries | None, key: Tensor, packing: Packing | AttendingPacking, kind: IndexKind
) -> Tensor | None:
    """Returns the tokens of its sequence that each token of a row sees, int32 [tokens, most]; later ones do not count.

    Rows of tokens that see all before them have any content. None if all tokens of the row do.

    Args:
        queries: None if no sequence is longer than `most` tokens.
        key: [tokens, 1, head_dim], which a cache stores.
    """
    if not isinstance(packing, Packing):
        return packing.choose(queries, key, kind)
    if queries is None or packing.longest <= kind.most:
        return None
    return choose_in_row(queries, key, packing, 0, kind.most)


def choose_in_row(queries: IndexQueries, key: Tensor, packing: Packing, first: int, most: int) -> Tensor:
    """Computes `choose` for consecutive tokens of a row, from token `first` on, given the keys of the whole row."""
    chosen = torch.zeros(len(queries.query), most, dtype=torch.int32, device=key.device)
    end, start = first + len(chosen), 0
    for length in packing.lengths:
        own = slice(max(start + most, first) - first, min(start + length, end) - first)
        if own.start < own.stop:
            chosen[own] = choose_for_last(queries.rows(own), key[start : first + own.stop, 0], most)
        start += length
    return chosen


def choose_for_last(queries: IndexQueries, key: Tensor, most: int) -> Tensor:
    """Returns what the last tokens of a sequence see, int32 [queries, most].

    Args:
        key: of all its tokens, [tokens, head_dim], more than `most`.
    """
    num_queries, parts = len(queries.query), []
    before = len(key) - num_queries
    for rows in _blocks(num_queries, queries_of_index(queries.query.shape[1], len(key))):
        seen = key[: max(before + rows.stop, most)]
        positions = torch.arange(before + rows.start, before + rows.stop, device=key.device)
        query, weights = queries.rows(rows)
        scores = _scores(query.flatten(0, 1)[None], seen[None], weights[None])[0]
        parts.append(_highest(scores, positions, most))
    return torch.cat(parts)


def choose_for_each(queries: IndexQueries, cached: Tensor, slots: Tensor, positions: Tensor, most: int) -> Tensor:
    """Returns what the newest token of each of n sequences sees, int32 [n, most].

    Args:
        cached: keys by slot, [slots, tokens, head_dim].
        slots: of the sequences, int64 [n]. positions: of the tokens, int64 [n].
    """
    parts = []
    for rows in _blocks(len(slots), queries_of_index(queries.query.shape[1], cached.shape[1])):
        query, weights = queries.rows(rows)
        scores = _scores(query, cached[slots[rows]], weights[:, None])[:, 0]
        parts.append(_highest(scores, positions[rows], most))
    return torch.cat(parts)


def _blocks(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Returns float32 [count, queries, tokens].

    Args:
        query: [count, queries * heads, head_dim].
        key: [count, tokens, head_dim].
        weights: [count, queries, heads].
    """
    if query.is_cuda and query.dtype != torch.float32:
        products = torch.bmm(query, key.mT, out_dtype=torch.float32)
    else:
        products = torch.bmm(query.float(), key.float().mT)
    by_head = products.relu_().unflatten(1, weights.shape[1:])
    return (weights.unsqueeze(-2) @ by_head).squeeze(-2)


def _highest(scores: Tensor, positions: Tensor, most: int) -> Tensor:
    """Returns the places of the highest scores [queries, tokens] up to each query's position, int32 [queries, most].

    Among equal ones, which are frequent since all heads may give 0, the earliest: so it is the same by chunks.
    """
    later = torch.arange(scores.shape[1], device=scores.device) > positions[:, None]
    order = scores.masked_fill_(later, float("-inf")).sort(dim=-1, descending=True, stable=True)
    return order.indices[:, :most].int()

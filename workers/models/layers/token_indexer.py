"""Runs the indexer of latent attention: its queries and keys, and the weights of its heads."""

from typing import Any

import torch
from torch import Tensor

from ...ops.attention import AttendingPacking, Packing
from ...ops.fused import Rotation, pairs_apart, rotate_heads
from ...ops.shared_keys import SharingRow
from ...ops.token_index import IndexKind, IndexQueries, choose
from ...parallel.sequence import ShardedPacking
from ...shapes.parts import Indexer


class TokenIndexer:
    """Chooses the tokens that the tokens of a layer see. Nothing in it has a gradient."""

    def __init__(self, part: Indexer, module: Any, number: int, rotary_dim: int) -> None:
        """Takes transformers' module of the indexer, the layer's number, and how many features of a head rotate."""
        self._part, self._module, self._rotary_dim = part, module, rotary_dim
        self._kind = IndexKind(number, part.most)
        self._scale = (part.heads * part.head_dim) ** -0.5

    @torch.no_grad()
    def choose(
        self, x: Tensor, latent_query: Tensor, rotation: Rotation, packing: Packing | AttendingPacking
    ) -> Tensor | None:
        """Returns what each token of the row sees, see token_index.choose.

        Args:
            x: input of attention, [tokens, hidden].
            latent_query: [tokens, query_rank].
        """
        row = packing.packing if isinstance(packing, SharingRow) else packing
        sees_all = row.longest <= self._part.most
        if sees_all and isinstance(row, Packing | ShardedPacking):
            return None
        key = self._module.k_norm(self._module.wk(x)).unsqueeze(1)
        queries = None if sees_all else self._queries(x, latent_query, rotation)
        return choose(queries, self._rotated(key, rotation), packing, self._kind)

    def _queries(self, x: Tensor, latent_query: Tensor, rotation: Rotation) -> IndexQueries:
        module = self._module
        query = module.wq_b(latent_query).unflatten(-1, (-1, self._part.head_dim))
        weights = module.weights_proj(x.to(module.weights_proj.weight.dtype)).float() * self._scale
        return IndexQueries(self._rotated(query, rotation), weights)

    def _rotated(self, heads: Tensor, rotation: Rotation) -> Tensor:
        """Rotates the first features of heads [tokens, heads, head_dim]."""
        if self._part.is_interleaved:
            heads = pairs_apart(heads, self._rotary_dim)
        return rotate_heads(heads.contiguous(), rotation, None)

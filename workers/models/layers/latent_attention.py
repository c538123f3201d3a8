"""Runs latent attention and its indexer: on keys and values of all heads in training, on latent vectors in sampling."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...ops.attention import AttendingPacking, Packing, attend
from ...ops.attention_kind import AttentionKind
from ...ops.frozen.quantized import dequantized
from ...ops.fused import Rotation, Rotations, pairs_apart, rotate_heads
from ...ops.kernels import kernels_for
from ...ops.linear import Merge
from ...ops.token_index import IndexKind, IndexQueries, choose
from ...parallel.mesh import Mesh
from ...parallel.sequence import ShardedPacking
from ...shapes.parts import Indexer, LatentAttention
from .norms import rms_norm_of
from .shared_keys import SharingRow


class LatentMixer:
    """Implements SequenceMixer.

    A sampler's cache keeps one latent vector for each token, which is the key of all heads, and whose first part is
    their value: queries are moved to the latent space, and outputs back from it.
    """

    def __init__(self, part: LatentAttention, module: Any, number: int, mesh: Mesh) -> None:
        """Takes the layer's number, and transformers' module of its attention."""
        self._part, self._module, self._number = part, module, number
        self.is_replicated = "self_attn" in mesh.spec.replicated
        self._kind = AttentionKind(number, module.scaling)
        self._latent_kind = AttentionKind(number, module.scaling, values_are_keys=True)
        self._query_norm = rms_norm_of(module.q_a_layernorm) if part.query_rank is not None else None
        self._latent_norm = rms_norm_of(module.kv_a_layernorm)
        indexer = part.own_indexer
        self._indexer = None if indexer is None else TokenIndexer(indexer, module.indexer, number, part.rotary_dim)

    def refresh(self, are_original: bool) -> None:
        self._latent_norm.refresh()
        if self._query_norm is not None:
            self._query_norm.refresh()

    def merge(self, merge: Merge) -> None:
        """Merges nothing."""

    def forward(self, x: Tensor, rotations: Rotations, packing: Packing | AttendingPacking) -> Tensor:
        rotation, part = rotations[self._part.rotation], self._part
        latent_query = self._latent_query(x)
        chosen = self._chosen(x, latent_query, rotation, packing)
        projection = self._module.q_proj if part.query_rank is None else self._module.q_b_proj
        query = rotation.scaled(projection(latent_query).unflatten(-1, (-1, part.key_dim)))
        plain, rotated = query.split([part.plain_dim, part.rotary_dim], -1)
        latent, shared = self._module.kv_a_proj_with_mqa(x).split([part.kv_rank, part.rotary_dim], -1)
        latent = self._latent_norm(latent.contiguous())
        rotated, shared = (_rotated(each, rotation, part, part.rotary_dim) for each in (rotated, shared.unsqueeze(1)))
        row = packing.packing if isinstance(packing, SharingRow) else packing
        if isinstance(row, Packing | ShardedPacking):
            attended = self._expanded(plain, rotated, latent, shared, row, self._kind.choosing(chosen))
        else:
            attended = self._absorbed(plain, rotated, latent, shared, row, self._latent_kind.choosing(chosen))
        return self._module.o_proj(attended.flatten(-2))

    def _latent_query(self, x: Tensor) -> Tensor:
        """Returns the latent vectors of queries; x itself if there are none."""
        return x if self._query_norm is None else self._query_norm(self._module.q_a_proj(x))

    def _chosen(
        self, x: Tensor, latent_query: Tensor, rotation: Rotation, packing: Packing | AttendingPacking
    ) -> Tensor | None:
        """Returns the tokens that each token sees, None for all."""
        if self._indexer is not None:
            return self._indexer.choose(x, latent_query, rotation, packing)
        if self._part.indexer is None:
            return None
        assert isinstance(packing, SharingRow)
        return packing.chosen_before(self._number)

    def _expanded(
        self,
        plain: Tensor,
        rotated: Tensor,
        latent: Tensor,
        shared: Tensor,
        packing: Packing | AttendingPacking,
        kind: AttentionKind,
    ) -> Tensor:
        """Returns the heads' outputs [tokens, heads, value_dim]. Values are padded to the keys' size where kernels need
        both to be equal."""
        part = self._part
        expanded = self._module.kv_b_proj(latent).unflatten(-1, (-1, part.plain_dim + part.value_dim))
        key, value = expanded.split([part.plain_dim, part.value_dim], -1)
        query = torch.cat((plain, rotated), -1)
        key = torch.cat((key, shared.expand(-1, key.shape[1], -1)), -1)
        may_differ = isinstance(packing, Packing) and kind.chosen is None
        if may_differ and kernels_for(query, key, value) is not None:
            return attend(query, key, value, packing, kind)
        size = max(part.key_dim, part.value_dim)
        query, key, value = (pad(each, (0, size - each.shape[-1])) for each in (query, key, value))
        return attend(query, key, value, packing, kind)[..., : part.value_dim]

    def _absorbed(
        self,
        plain: Tensor,
        rotated: Tensor,
        latent: Tensor,
        shared: Tensor,
        packing: AttendingPacking,
        kind: AttentionKind,
    ) -> Tensor:
        part, weight = self._part, dequantized(self._module.kv_b_proj.weight)
        to_key, to_value = weight.unflatten(0, (-1, part.plain_dim + part.value_dim)).split(
            [part.plain_dim, part.value_dim], 1
        )
        query = torch.cat((torch.bmm(plain.transpose(0, 1), to_key).transpose(0, 1), rotated), -1)
        key = torch.cat((latent.unsqueeze(1), shared), -1)
        attended = attend(query, key, key, packing, kind)[..., : part.kv_rank]
        return torch.bmm(attended.transpose(0, 1), to_value.mT).transpose(0, 1)


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
        return choose(queries, _rotated(key, rotation, self._part, self._rotary_dim), packing, self._kind)

    def _queries(self, x: Tensor, latent_query: Tensor, rotation: Rotation) -> IndexQueries:
        module = self._module
        query = module.wq_b(latent_query).unflatten(-1, (-1, self._part.head_dim))
        weights = module.weights_proj(x.to(module.weights_proj.weight.dtype)).float() * self._scale
        return IndexQueries(_rotated(query, rotation, self._part, self._rotary_dim), weights)


def _rotated(heads: Tensor, rotation: Rotation, part: LatentAttention | Indexer, rotary_dim: int) -> Tensor:
    """Rotates the first features of heads [tokens, heads, features]; interleaved pairs are moved apart, for queries and
    keys alike."""
    apart = pairs_apart(heads, rotary_dim) if part.is_interleaved else heads
    return rotate_heads(apart.contiguous(), rotation, None)

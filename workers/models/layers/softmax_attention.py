"""Runs softmax attention: projections, norms and rotations of heads, attention, gates."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ...ops.attention import AttendingPacking, Packing, attend
from ...ops.attention_kind import AttentionKind, Sinks
from ...ops.fused import HeadLayerNorms, LayerNorm, RmsNorm, Rotation, Rotations, pairs_apart, rotate_heads
from ...ops.linear import Merge, MergedProjection
from ...parallel.mesh import Mesh, Team
from ...parallel.norms import ShardedHeadNorms
from ...shapes.families import Family
from ...shapes.parts import OutputGate, SoftmaxAttention
from .norms import norm_of
from .shared_keys import SharingRow


def _softplus(x: Tensor) -> Tensor:
    return softplus(x.float()).to(x.dtype)


_GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": _softplus}


def _head_norm(part: SoftmaxAttention, norm: Any, module: Any, family: Family, team: Team) -> RmsNorm:
    """Returns the norm of transformers' module `norm` of the attention `module`.

    Args:
        team: the ranks that divide the heads.
    """
    if part.norms_heads == "listed":
        own = len(norm.norms) // team.size
        weights = [each.weight for each in norm.norms[own * team.index : own * (team.index + 1)]]
        return HeadLayerNorms(weights, torch.tensor(norm.norms[0].eps, device=weights[0].device))
    if part.learns_norms:
        return norm_of(norm, family)
    weight = module.q_proj.weight.new_ones(part.head_dim)
    return RmsNorm(weight, torch.tensor(norm.eps, device=weight.device))


class SoftmaxMixer:
    """Implements SequenceMixer."""

    def __init__(self, part: SoftmaxAttention, module: Any, number: int, family: Family, mesh: Mesh) -> None:
        """Takes the layer's number, and transformers' module of its attention."""
        self._part, self._module = part, module
        self.is_replicated = "self_attn" in mesh.spec.replicated
        sinks = Sinks(module.sinks) if part.has_sinks else None
        scaling = module.scaling * part.score_scale
        cached, is_stored = (number, False) if part.kv_source is None else (part.kv_source, True)
        self._kind = AttentionKind(
            *(cached, scaling, part.window, sinks), cap=part.score_cap, part=part.part_size, is_stored=is_stored
        )
        tp = mesh.spec.tp_size_of("self_attn")
        self._sizes = [heads * part.head_dim // tp for heads in (part.heads, part.kv_heads, part.kv_heads)]
        self._query_norm: RmsNorm | None = None
        self._key_norm: RmsNorm | None = None
        self._joint_norms: ShardedHeadNorms | None = None
        self._value_norm: RmsNorm | None = None
        if part.norms_values and part.kv_source is None:
            weight = torch.ones(part.head_dim, device=module.q_proj.weight.device)
            self._value_norm = RmsNorm(weight, torch.tensor(module.v_norm.eps, device=weight.device))
        if part.kv_source is not None:
            self._query_norm = norm_of(getattr(module, part.head_norms[0]), family)
        elif part.norms_heads is not None:
            team = mesh.tensor_team("self_attn")
            query, key = (_head_norm(part, getattr(module, name), module, family, team) for name in part.head_norms)
            if part.norms_heads == "together":
                self._joint_norms = ShardedHeadNorms(query, key, team)
            else:
                self._query_norm, self._key_norm = query, key
        self._merged = MergedProjection()
        self._merged_norm: RmsNorm | None = None

    @staticmethod
    def is_recognised(part: SoftmaxAttention, module: Any, family: Family) -> bool:
        """True if the module has the projections and norms of the part."""
        norms = [getattr(module, name) for name in part.head_norms if hasattr(module, name)]
        num_norms = 2 if part.kv_source is None else 1
        has_same_norms = len(norms) == (num_norms if part.norms_heads is not None else 0)
        has_same_values = part.is_fused or (getattr(module, "v_proj", None) is not None) == (
            part.projects_values and part.kv_source is None
        )
        is_alike = hasattr(module, "qkv_proj") == part.is_fused and hasattr(module, "sinks") == part.has_sinks
        has_same_cap = getattr(module, "attn_logit_softcapping", None) == part.score_cap
        has_own = part.kv_source is None
        is_alike = is_alike and has_same_values and hasattr(module, "v_norm") == (part.norms_values and has_own)
        return (
            is_alike
            and has_same_cap
            and has_same_norms
            and all(family.is_norm(norm, part.norm_module) for norm in norms)
        )

    def refresh(self, are_original: bool) -> None:
        self._merged.refresh(are_original)
        joint = self._joint_norms.parts if self._joint_norms is not None else ()
        for norm in (self._query_norm, self._key_norm, *joint):
            if norm is not None:
                norm.refresh()

    def merge(self, merge: Merge) -> None:
        module, part = self._module, self._part
        if part.is_fused or part.is_gated or part.norms_after_rotation:
            return
        if part.norms_heads not in (None, "each"):
            return
        if part.kv_source is not None or not part.projects_values:
            return
        self._merged.merge(merge, [module.q_proj, module.k_proj, module.v_proj])
        if self._query_norm is not None and self._key_norm is not None:
            heads = [size // part.head_dim for size in self._sizes]
            weights = [self._query_norm.weight.expand(heads[0], -1), self._key_norm.weight.expand(heads[1], -1)]
            self._merged_norm = RmsNorm(torch.cat(weights), self._query_norm.eps)

    def forward(self, x: Tensor, rotations: Rotations, packing: Packing | AttendingPacking) -> Tensor:
        rotation = rotations[self._part.rotation]
        if self._part.kv_source is not None:
            assert isinstance(packing, SharingRow)
            query = self._module.q_proj(x).unflatten(-1, (-1, self._part.head_dim))
            attended = packing.attend_again(self._rotated(query, rotation, self._query_norm), self._kind)
            return self._module.o_proj(attended.flatten(-2))
        if self._merged.suits(x):
            (query, key, value), gate = self._merged_heads(x, rotation), None
        else:
            query, gate, key, value = self._projected(x)
            query = self._rotated(query, rotation, self._query_norm)
            key = self._rotated(key, rotation, self._key_norm)
        if self._value_norm is not None:
            value = self._value_norm(value.flatten(0, 1)).view_as(value)
        attended = attend(rotation.scaled(query), key, value, packing, self._kind)
        if self._part.gate is not None:
            attended = self._gated(attended, x, self._part.gate)
        attended = attended.flatten(-2)
        return self._module.o_proj(attended if gate is None else attended * gate.sigmoid())

    def _gated(self, attended: Tensor, x: Tensor, gate: OutputGate) -> Tensor:
        """Multiplies [tokens, heads, head_dim] with the gates of x [tokens, hidden]."""
        numbers = _GATES[gate.activation](getattr(self._module, gate.name)(x))
        return attended * numbers.unflatten(-1, (attended.shape[1], -1))

    def _merged_heads(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query and key, normed and rotated, and value: [tokens, heads, head_dim]."""
        heads = self._merged.forward(x).view(x.shape[0], -1, self._part.head_dim)
        queries, keys, values = (size // self._part.head_dim for size in self._sizes)
        rotated = self._rotated(heads[:, : queries + keys], rotation, self._merged_norm)
        query, key = rotated.split((queries, keys), dim=1)
        return query, key, heads[:, -values:]

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Returns query [tokens, heads, head_dim], gate [tokens, heads * head_dim] if there is one, key and value."""
        module, gate = self._module, None
        if self._part.is_fused:
            query, key, value = module.qkv_proj(x).split(self._sizes, dim=-1)
            # Cloned, since the view of the values that backward keeps would hold the queries and keys too.
            value = value.clone() if torch.is_grad_enabled() else value
        else:
            query, key = module.q_proj(x), module.k_proj(x)
            value = module.v_proj(x) if self._part.projects_values else key
        if self._part.is_gated:
            query, gate = query.unflatten(-1, (-1, 2, self._part.head_dim)).unbind(-2)
            query, gate = query.flatten(-2), gate.flatten(-2)
        if self._joint_norms is not None:
            query, key = self._joint_norms.normed(query, key)
        query, key, value = (each.unflatten(-1, (-1, self._part.head_dim)) for each in (query, key, value))
        return query, gate, key, value

    def _rotated(self, heads: Tensor, rotation: Rotation, norm: RmsNorm | None) -> Tensor:
        """Rotates [tokens, heads, head_dim], and applies each head's norm, if there is one."""
        if isinstance(norm, LayerNorm):
            heads, norm = norm(heads), None
        if self._part.is_interleaved:
            heads = pairs_apart(heads, self._part.rotary_dim)
        if norm is None and self._part.rotation is None:
            return heads
        if norm is None or not self._part.norms_after_rotation:
            return rotate_heads(heads, rotation, norm)
        rotated = rotate_heads(heads, rotation, None)
        return norm(rotated.flatten(0, 1)).view_as(rotated)

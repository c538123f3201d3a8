"""Runs linear attention by the gated delta rule: projections, convolution, the rule, and its output's gated norm."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ...ops.attention import AttendingPacking, Packing
from ...ops.fused import Rotations, swiglu
from ...ops.linear import Merge, MergedProjection
from ...ops.recurrence import recur
from ...ops.recurrences import gated_delta
from ...ops.recurrences.convolution import CausalConvolution
from ...parallel.mesh import Mesh, Team
from ...parallel.sequence import ShardedPacking
from ...parallel.split import Split
from ...shapes.parts import GatedDelta
from .norms import rms_norm_of


class GatedDeltaMixer:
    """Implements SequenceMixer."""

    def __init__(self, part: GatedDelta, module: Any, number: int, mesh: Mesh) -> None:
        """Takes the layer's number, and transformers' module of its linear attention."""
        self._part, self._module, self._number = part, module, number
        self.is_replicated = "linear_attn" in mesh.spec.replicated
        tp = mesh.spec.tp_size_of("linear_attn")
        self._key_heads, self._value_heads = part.key_heads // tp, part.value_heads // tp
        self._rule = gated_delta.GatedDeltaRule(number, self._value_heads, part.key_dim, part.value_dim)
        self._norm = rms_norm_of(module.norm)
        self._merged, self._merged_by_head = MergedProjection(), MergedProjection()

    def refresh(self, are_original: bool) -> None:
        self._norm.refresh()
        for merged in (self._merged, self._merged_by_head):
            merged.refresh(are_original)

    def merge(self, merge: Merge) -> None:
        """Merges layers that adapters adapt, and those that they leave alone."""
        module = self._module
        if not self._part.is_fused:
            self._merged.merge(merge, [module.in_proj_qkv, module.in_proj_z])
            self._merged_by_head.merge(merge, [module.in_proj_b, module.in_proj_a])

    def forward(self, x: Tensor, rotations: Rotations, packing: Packing | AttendingPacking) -> Tensor:
        mixed, gate, beta, decay = self._projected(x)
        log_decay = -self._module.A_log.float().exp() * softplus(decay.float() + self._module.dt_bias)
        by_head = log_decay, beta.sigmoid()
        if isinstance(packing, ShardedPacking):
            out = packing.by_heads([*self._heads(mixed), *by_head], self._mixed_share)
        else:
            out = self._mixed(mixed, by_head, packing, self._module.conv1d.weight)
        normed = self._norm(out.flatten(0, 1))
        return self._module.out_proj(swiglu(gate.reshape(normed.shape), normed).view(len(x), -1))

    def _mixed(
        self, mixed: Tensor, by_head: Sequence[Tensor], packing: Packing | AttendingPacking, weight: Tensor
    ) -> Tensor:
        """Returns the rule's output [tokens, value_heads, value_dim] for queries, keys and values [tokens, features]
        before the convolution with this weight."""
        convolution = CausalConvolution(self._number, weight, None, True, mixed.dtype)
        mixed = recur(convolution, [mixed], packing)
        return recur(self._rule, [*self._heads(mixed), *by_head], packing)

    def _mixed_share(self, inputs: Sequence[Tensor], packing: Packing, team: Team) -> Tensor:
        """Computes `_mixed` for this rank's share of the heads. inputs: queries, keys, values, and those by head."""
        share = Split("sp", team.size, team.index, tuple(self._sizes))
        mixed = torch.cat([each.flatten(1) for each in inputs[:3]], dim=1)
        return self._mixed(mixed, inputs[3:], packing, share.part(self._module.conv1d.weight, 0))

    def _heads(self, mixed: Tensor) -> Sequence[Tensor]:
        """Returns queries, keys and values [tokens, heads, features of a head]."""
        shares = sum(self._sizes) // mixed.shape[-1]
        parts = mixed.split([size // shares for size in self._sizes], dim=-1)
        features = self._part.key_dim, self._part.key_dim, self._part.value_dim
        return [part.unflatten(-1, (-1, size)) for part, size in zip(parts, features, strict=True)]

    @property
    def _sizes(self) -> list[int]:
        """The features of queries, keys and values."""
        keys = self._key_heads * self._part.key_dim
        return [keys, keys, self._value_heads * self._part.value_dim]

    def _projected(self, x: Tensor) -> Sequence[Tensor]:
        """Returns queries, keys and values [tokens, features] in one, gates [tokens, features], and for each value
        head [tokens, heads] how far values are corrected, and the decay, both before their activations."""
        if self._part.is_fused:
            return self._projected_by_key_head(x)
        module = self._module
        if self._merged.suits(x):
            wide = self._merged.forward(x).split([sum(self._sizes), self._sizes[-1]], dim=-1)
            return *wide, *self._merged_by_head.forward(x).chunk(2, dim=-1)
        return module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)

    def _projected_by_key_head(self, x: Tensor) -> Sequence[Tensor]:
        """Reorders the outputs of projections that are sorted by key head."""
        repeats, part = self._value_heads // self._key_heads, self._part
        whole, small = self._module.in_proj_qkvz(x), self._module.in_proj_ba(x)
        of_head = [part.key_dim, part.key_dim, repeats * part.value_dim, repeats * part.value_dim]
        query, key, value, gate = whole.unflatten(-1, (self._key_heads, -1)).split(of_head, dim=-1)
        beta, decay = small.unflatten(-1, (self._key_heads, -1)).split([repeats, repeats], dim=-1)
        mixed = torch.cat([each.flatten(-2) for each in (query, key, value)], dim=-1)
        return mixed, gate.flatten(-2), beta.flatten(-2), decay.flatten(-2)

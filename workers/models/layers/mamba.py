"""Runs Mamba-2: projection, convolution, the state-space recurrence, and its output's gated norm."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ...ops.attention import AttendingPacking, Packing
from ...ops.fused import Rotations, gated_group_norm, swiglu
from ...ops.linear import Merge
from ...ops.recurrence import recur
from ...ops.recurrences.convolution import CausalConvolution
from ...ops.recurrences.state_space import StateSpace
from ...parallel.mesh import Mesh, Team
from ...parallel.sequence import ShardedPacking
from ...parallel.split import Split
from ...shapes.families import Family
from ...shapes.parts import Mamba
from .norms import rms_norm_of


class MambaMixer:
    """Implements SequenceMixer."""

    def __init__(self, part: Mamba, module: Any, number: int, mesh: Mesh) -> None:
        """Takes the layer's number, and transformers' module of the mixer."""
        self._part, self._module, self._number = part, module, number
        self.is_replicated = "mamba" in mesh.spec.replicated
        tp = mesh.spec.tp_size_of("mamba")
        self._groups, self._sizes = part.groups // tp, [size // tp for size in part.sections]
        self._copies = part.copies_along_sp(mesh.spec)
        self._norm = rms_norm_of(module.norm) if part.has_norm else None
        self._limits: tuple[float, float] = module.time_step_limit
        self._scales: Tensor | None = None
        if set(part.scales) != {1.0}:
            scales = [torch.full((size,), scale) for size, scale in zip(self._sizes, part.scales, strict=True)]
            self._scales = torch.cat(scales).to(module.conv1d.weight)

    @staticmethod
    def is_recognised(part: Mamba, module: Any, family: Family) -> bool:
        """True if the module has the biases, the norm and the activation of the part."""
        has_conv_bias, has_bias = module.conv1d.bias is not None, module.in_proj.bias is not None
        has_same_biases = has_conv_bias == part.conv_bias and has_bias == part.bias
        has_norm = hasattr(module.norm, "weight")
        has_same_norm = has_norm == part.has_norm and (not has_norm or family.defines(module.norm, "RMSNormGated"))
        return has_same_biases and has_same_norm and module.activation == "silu"

    def refresh(self, are_original: bool) -> None:
        if self._norm is not None:
            self._norm.refresh()

    def merge(self, merge: Merge) -> None:
        """Merges nothing: there is one projection."""

    def forward(self, x: Tensor, rotations: Rotations, packing: Packing | AttendingPacking) -> Tensor:
        projected = self._module.in_proj(x)
        if self._scales is not None:
            projected = projected * self._scales
        gate, mixed, time_steps = projected.split([self._sizes[0], sum(self._sizes[1:4]), self._sizes[4]], dim=-1)
        time_steps = softplus(time_steps.float() + self._module.dt_bias).clamp(*self._limits)
        if isinstance(packing, ShardedPacking):
            x, *shared = self._heads(mixed, time_steps.shape[1])
            shared = [each.repeat_interleave(self._copies, dim=1) for each in shared]
            out = packing.by_heads([x, *shared, time_steps], self._mixed_share)
        else:
            out = self._mixed(mixed, time_steps, packing)
        return self._module.out_proj(self._gated(out, gate))

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Returns the gated norm [tokens, features] of the recurrence's output [tokens, heads, head_dim]."""
        if self._norm is None:
            return swiglu(gate, out.flatten(1))
        out, gate = (each.reshape(len(gate), self._groups, -1) for each in (out, gate))
        return gated_group_norm(out, gate, self._norm, self._part.gates_first)

    def _mixed_share(self, inputs: Sequence[Tensor], packing: Packing, team: Team) -> Tensor:
        """Computes `_mixed` for this rank's share of the heads. inputs: x, b, c [tokens, heads or groups, features],
        and time steps [tokens, heads]."""
        mixed = torch.cat([each.flatten(1) for each in inputs[:3]], dim=1)
        return self._mixed(mixed, inputs[3], packing, team)

    def _mixed(
        self, mixed: Tensor, time_steps: Tensor, packing: Packing | AttendingPacking, team: Team | None = None
    ) -> Tensor:
        """Returns the recurrence's output [tokens, heads, head_dim] for x, b and c [tokens, features] before the
        convolution. team: the ranks that share out the heads, if any."""

        def own(whole: Tensor, *sizes: int) -> Tensor:
            return whole if team is None else Split("sp", team.size, team.index, sizes).part(whole, 0)

        def own_channels(whole: Tensor) -> Tensor:
            x, *shared = whole.split(self._sizes[1:4])
            copied = [each.unflatten(0, (self._groups, -1)).repeat_interleave(self._copies, dim=0) for each in shared]
            return torch.cat([own(x, len(x)), *(own(each, len(each)).flatten(0, 1) for each in copied)])

        conv1d, heads = self._module.conv1d, self._sizes[4]
        weight, bias = conv1d.weight, conv1d.bias
        if team is not None:
            weight, bias = own_channels(weight), None if bias is None else own_channels(bias)
        convolution = CausalConvolution(self._number, weight, bias, True, mixed.dtype)
        x, b, c = self._heads(recur(convolution, [mixed], packing), time_steps.shape[1])
        decay, skip = own(-self._module.A_log.float().exp(), heads), own(self._module.D, heads)
        rule = StateSpace(self._number, self._part.head_dim, self._part.state_dim, decay, skip)
        return recur(rule, [x, time_steps, b, c], packing)

    def _heads(self, mixed: Tensor, heads: int) -> Sequence[Tensor]:
        """Returns x [tokens, heads, head_dim], and b and c [tokens, groups, state_dim]."""
        features = heads * self._part.head_dim
        x, shared = mixed.split([features, mixed.shape[-1] - features], dim=-1)
        b_and_c = [each.unflatten(-1, (-1, self._part.state_dim)) for each in shared.chunk(2, dim=-1)]
        return x.unflatten(-1, (heads, -1)), *b_and_c

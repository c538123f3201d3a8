"""The gated delta rule: a state maps keys to values; it decays, and each token corrects the value of its key.

With decay exp(g), a token changes the state S [key_dim, value_dim] to exp(g) S + k (beta (v - exp(g) S' k))', and its
output is S' q: Yang et al., Gated Delta Networks (2024), equation 10, https://arxiv.org/abs/2412.06464.
"""

import logging
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..attention import Packing
from ..kernels import kernels_for
from ..recurrence import StateKind
from .chunked_delta import DeltaInputs, normalize, scan_chunks

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GatedDeltaRule:
    """The gated delta rule of a layer, a Recurrence.

    Its inputs are those of DeltaInputs. The output has v's shape and dtype; the arithmetic is in float32. On a GPU it
    runs as kernels of flash-linear-attention, if that is installed.
    """

    layer: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def state(self) -> StateKind:
        return StateKind(self.layer, "delta", (self.value_heads, self.key_dim, self.value_dim), torch.float32)

    def scan(self, inputs: Sequence[Tensor], packing: Packing, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        row = DeltaInputs(*inputs)
        fla = _fla_for(row.v)
        if fla is None:
            return scan_chunks(row, packing, initial)
        bounds = packing.layout(_long_bounds, row.v.device, 0)
        out, states = fla.chunk_gated_delta_rule(
            *(x.unsqueeze(0) for x in row),
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds,
        )
        return out.squeeze(0).to(row.v.dtype), states.detach()

    def step(self, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor:
        row = DeltaInputs(*inputs)
        kernels = kernels_for(*row, states)
        if kernels is not None:
            return kernels.delta_step(row, states, slots)
        fla, state = _fla_for(row.v), states.index_select(0, slots)
        out, state = _step(row, state) if fla is None else _step_of_fla(fla, row, state)
        states.index_copy_(0, slots, state)
        return out.to(row.v.dtype)


def _step(row: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output of a token of each sequence, and the states after it; overwrites those before it."""
    repeats = row.v.shape[1] // row.q.shape[1]
    query, _ = normalize(row.q, row.q.shape[-1] ** -0.5)
    key, _ = normalize(row.k)
    similar = torch.linalg.vecdot(query, key).repeat_interleave(repeats, dim=1).unsqueeze(2)
    pairs = torch.stack((key, query), dim=2).repeat_interleave(repeats, dim=1)
    state.mul_(row.g.float().exp()[:, :, None, None])
    known, out = (pairs @ state).unbind(2)
    correction = (row.v - known).mul_(row.beta.unsqueeze(2))
    state.addcmul_(pairs[:, :, 0].unsqueeze(3), correction.unsqueeze(2))
    return out.addcmul(similar, correction), state


def _step_of_fla(fla: Any, row: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = (x.unsqueeze(1) for x in row)
    out, state = fla.fused_recurrent_gated_delta_rule(
        q, k, v, g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return out.squeeze(1), state


def _long_bounds(packing: Packing, device: torch.device, _size: int) -> Tensor:
    """Returns Packing.bounds as int64; one tensor for all layers, since flash-linear-attention caches by identity."""
    return packing.bounds(device).long()


def _fla_for(x: Tensor) -> Any:
    """Returns flash-linear-attention's module of this rule, or None if x needs torch's own operations."""
    return _load_fla(x.device) if x.is_cuda else None


@cache
def _load_fla(device: torch.device) -> Any:
    """Imports the module and runs one of its kernels; returns None, and logs why, if that fails."""
    x = torch.ones(1, 1, 1, 16, device=device)
    try:
        from fla.ops import gated_delta_rule  # pyright: ignore[reportMissingImports]

        gated_delta_rule.fused_recurrent_gated_delta_rule(x, x, x, x[..., 0], beta=x[..., 0])
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        _log.info("torch computes the gated delta rule on %s, not flash-linear-attention: %s", device, error)
        return None
    return gated_delta_rule

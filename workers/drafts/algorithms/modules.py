"""The modules of drafts, as functions of given tensors: any dtype, float64 among them, and any device."""

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from ...parallel.collectives import copied, summed
from ...parallel.mesh import ALONE, Team
from .strategy import Tensors


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [tokens, size], in float32 at least: as Llama's."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return rms_norm(wide, (x.shape[-1],), eps=eps).to(x.dtype) * weight


def swiglu_mlp(x: Tensor, weights: Tensors, prefix: str, team: Team = ALONE) -> Tensor:
    """prefix: of the names of gate_proj, up_proj and down_proj. team: the ranks that share out the features between
    them."""
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    x = copied(x, team)
    return summed(linear(silu(linear(x, gate)) * linear(x, up), down), team)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim]; cos and sin [tokens, 1, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotation(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, 1, head_dim]. frequencies: float32 [head_dim / 2]."""
    angles = positions[:, None, None].to(frequencies.dtype) * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

"""Modules of drafts as functions of given tensors. They work on any device and in any dtype, including float64."""

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from ...parallel.collectives import copy_to_team, reduce_from_team
from ...parallel.mesh import ALONE, Team
from .algorithm import Tensors


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns Llama's RMS norm of x [tokens, size], computed in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return rms_norm(wide, (x.shape[-1],), eps=eps).to(x.dtype) * weight


def swiglu_mlp(x: Tensor, weights: Tensors, prefix: str, team: Team = ALONE) -> Tensor:
    """Returns the output of a SwiGLU feed-forward part.

    Args:
        prefix: precedes the names of gate_proj, up_proj and down_proj.
        team: the ranks that divide the intermediate features among them.
    """
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    x = copy_to_team(x, team)
    return reduce_from_team(linear(silu(linear(x, gate)) * linear(x, up), down), team)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies a rotary embedding to x [tokens, heads, head_dim]. cos and sin are [tokens, 1, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotation(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, [tokens, 1, head_dim] each. `frequencies` is float32 [head_dim / 2]."""
    angles = positions[:, None, None].to(frequencies.dtype) * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

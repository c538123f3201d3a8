"""Modules that all drafts have, over given tensors. They work on any device and in any dtype, including float64."""

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from ...parallel.collectives import copy_to_team, reduce_from_team
from ...parallel.mesh import Team
from .algorithm import Tensors
from .draft_shape import DraftShape

# Cosines and sines of a rotary embedding, [tokens, 1, head_dim] each.
CosSin = tuple[Tensor, Tensor]


class DraftModules:
    """A draft's modules.

    team: the ranks that divide attention heads and the features of the MLP among them.
    """

    def __init__(self, shape: DraftShape, parameters: Tensors, team: Team) -> None:
        self.shape, self.parameters, self.team = shape, parameters, team

    def normed(self, x: Tensor, name: str) -> Tensor:
        """Returns Llama's RMS norm of x [..., size], computed in at least float32."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return rms_norm(wide, (x.shape[-1],), eps=self.shape.eps).to(x.dtype) * self.parameters[f"{name}.weight"]

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim))

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> CosSin:
        frequencies, scale = self.shape.rotation(positions.device)
        angles = positions[:, None, None].to(frequencies.dtype) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def finish_layer(self, state: Tensor, attended: Tensor, layer: str) -> Tensor:
        """Adds the projected output of attention, [tokens, heads, head_dim], and the MLP's to the state."""
        update = linear(attended.flatten(1), self.parameters[f"{layer}.self_attn.o_proj.weight"])
        state = state + reduce_from_team(update, self.team)
        gate, up, down = (self.parameters[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = copy_to_team(self.normed(state, f"{layer}.post_attention_layernorm"), self.team)
        return state + reduce_from_team(linear(silu(linear(x, gate)) * linear(x, up), down), self.team)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def initialize(weight: Tensor, generator: torch.Generator) -> None:
    """Sets a norm to 1, and draws a matrix such that its outputs are about as large as its inputs."""
    if weight.ndim == 1:
        weight.fill_(1.0)
    else:
        weight.copy_(torch.empty(weight.shape).normal_(std=weight.shape[1] ** -0.5, generator=generator))

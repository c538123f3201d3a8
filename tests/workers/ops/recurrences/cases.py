"""The recurrences with random inputs, for the tests of each and of what all have in common."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus
from trainhouse.workers.ops.recurrence import Recurrence
from trainhouse.workers.ops.recurrences.convolution import CausalConvolution
from trainhouse.workers.ops.recurrences.gated_delta import GatedDeltaRule
from trainhouse.workers.ops.recurrences.state_space import StateSpace

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 24, 16
CHANNELS, WIDTH = 6, 4
HEADS, GROUPS, HEAD_DIM, STATE_DIM = 6, 2, 5, 7


@dataclass(frozen=True)
class Case:
    """A recurrence, and its random inputs for a number of tokens."""

    op: Recurrence
    inputs: Callable[[int, int, torch.dtype], list[Tensor]]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def delta_inputs(num_tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns q, k, v, g and beta; the keys resemble each other, so that corrections depend on one another."""
    q = normal(num_tokens, KEY_HEADS, KEY_DIM, seed=seed, dtype=dtype)
    k = normal(num_tokens, KEY_HEADS, KEY_DIM, seed=seed + 1, dtype=dtype) + 0.5
    v = normal(num_tokens, VALUE_HEADS, VALUE_DIM, seed=seed + 2, dtype=dtype)
    g = -0.2 * normal(num_tokens, VALUE_HEADS, seed=seed + 3).abs()
    return [q, k, v, g, normal(num_tokens, VALUE_HEADS, seed=seed + 4).sigmoid().to(dtype)]


def delta() -> GatedDeltaRule:
    return GatedDeltaRule(0, VALUE_HEADS, KEY_DIM, VALUE_DIM)


def convolution_inputs(num_tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [normal(num_tokens, CHANNELS, seed=seed, dtype=dtype)]


def convolution(dtype: torch.dtype = torch.float32, is_silu: bool = True, has_bias: bool = True) -> CausalConvolution:
    bias = normal(CHANNELS, seed=8, dtype=dtype) if has_bias else None
    return CausalConvolution(0, normal(CHANNELS, 1, WIDTH, seed=9, dtype=dtype), bias, is_silu, dtype)


def space_inputs(num_tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns x, dt, b and c."""
    x = normal(num_tokens, HEADS, HEAD_DIM, seed=seed, dtype=dtype)
    b, c = (normal(num_tokens, GROUPS, STATE_DIM, seed=seed + i, dtype=dtype) for i in (1, 2))
    return [x, softplus(normal(num_tokens, HEADS, seed=seed + 3) - 1), b, c]


def space() -> StateSpace:
    return StateSpace(0, HEAD_DIM, STATE_DIM, -normal(HEADS, seed=10).exp(), normal(HEADS, seed=11))


CASES = {
    "convolution": Case(convolution(), convolution_inputs),
    "gated_delta": Case(delta(), delta_inputs),
    "state_space": Case(space(), space_inputs),
}

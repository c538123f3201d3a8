"""Packed attention against a naive softmax per sequence, with sliding windows; and its gradients."""

import math

import pytest
import torch
from torch import Tensor, nn
from trainhouse.workers.attention import CachedPacking, Packing, pack_lengths, packed_attention

from .adapted import relative_error

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
LENGTHS = [5, 5, 3, 9]


class Layer(nn.Module):
    layer_idx = 0


def rows(num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value of a packed row"""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(1, heads, num_tokens, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def naive(query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    """Causal attention of one sequence [1, heads, length, head_dim] -> [length, heads, head_dim]."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) / math.sqrt(HEAD_DIM)
    i, j = torch.meshgrid(torch.arange(query.shape[2]), torch.arange(query.shape[2]), indexing="ij")
    sees = (j <= i) & (j > i - (window or 10**9))
    return (scores.masked_fill(~sees, -math.inf).softmax(-1) @ value)[0].transpose(0, 1)


def attend(qkv: tuple[Tensor, Tensor, Tensor], packing: Packing | CachedPacking, window: int | None = None) -> Tensor:
    out, _ = packed_attention(Layer(), *qkv, None, packing=packing, scaling=HEAD_DIM**-0.5, sliding_window=window)
    return out[0]


def split(qkv: tuple[Tensor, Tensor, Tensor], lengths: list[int]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(x.split(lengths, dim=2) for x in qkv), strict=True))


@pytest.mark.parametrize("window", [None, 4])
def test_packed_sequences_attend_as_each_alone(window: int | None) -> None:
    qkv = rows(sum(LENGTHS), seed=0)
    expected = torch.cat([naive(*part, window=window) for part in split(qkv, LENGTHS)])
    torch.testing.assert_close(attend(qkv, Packing(pack_lengths(LENGTHS)), window), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError):
        other = attend(qkv, Packing(pack_lengths([10, 3, 9])), window)
        torch.testing.assert_close(other, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_gradients_are_those_of_each_sequence_alone(window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    assert_gradients(torch.device("cpu"), window, dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_gradients_on_a_gpu_are_those_of_each_sequence_alone(
    window: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    assert_gradients(torch.device("cuda"), window, dtype, tolerance)


def assert_gradients(device: torch.device, window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    weight = torch.randn(sum(LENGTHS), HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(9))
    exact = [x.to(dtype).double().requires_grad_() for x in rows(sum(LENGTHS), seed=7)]
    leaves = [x.detach().to(device, dtype).requires_grad_() for x in exact]
    parts = split((exact[0], exact[1], exact[2]), LENGTHS)
    wanted = torch.cat([naive(part[0], part[1], part[2], window=window) for part in parts])
    found = attend((leaves[0], leaves[1], leaves[2]), Packing(pack_lengths(LENGTHS)), window)
    gradients = torch.autograd.grad((found * weight.to(found)).sum(), leaves)
    exact_gradients = torch.autograd.grad((wanted * weight.double()).sum(), exact)
    for one, other in zip((found, *gradients), (wanted, *exact_gradients), strict=True):
        error = relative_error(one.double().cpu(), other)
        assert error < tolerance < relative_error(one.double().cpu() * (1 + 2 * tolerance), other)


def test_equal_neighbours_are_one_group() -> None:
    groups = pack_lengths([5, 5, 3, 5])
    assert [(group.start, group.count, group.length) for group in groups] == [(0, 2, 5), (10, 1, 3), (13, 1, 5)]

"""Packed attention against a naive softmax per sequence: prefill, decoding, sliding windows, and what slots leave."""

import math

import pytest
import torch
from torch import Tensor, nn
from trainhouse.workers.attention import DecodeStep, KeyValueCache, Packing, pack_lengths, packed_attention

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


def attend(qkv: tuple[Tensor, Tensor, Tensor], packing: Packing, window: int | None = None) -> Tensor:
    out, _ = packed_attention(Layer(), *qkv, None, packing=packing, scaling=HEAD_DIM**-0.5, sliding_window=window)
    return out[0]


def split(qkv: tuple[Tensor, Tensor, Tensor], lengths: list[int]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(x.split(lengths, dim=2) for x in qkv), strict=True))


def decode_packing(cache: KeyValueCache, slots: list[int], lengths: list[int]) -> Packing:
    order = torch.tensor(slots).argsort()
    row_of_slot = None if slots == sorted(slots) else order
    step = DecodeStep(torch.tensor(slots), row_of_slot, torch.tensor(lengths), max(lengths) + 1)
    return Packing((), cache, step=step)


def last_tokens(qkv: tuple[Tensor, Tensor, Tensor], lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    ends = torch.tensor(lengths).cumsum(0) - 1
    return tuple(x[:, :, ends] for x in qkv)


def all_but_last(qkv: tuple[Tensor, Tensor, Tensor], lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    parts = split(qkv, lengths)
    return tuple(torch.cat([part[i][:, :, :-1] for part in parts], dim=2) for i in range(3))


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


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_a_decoded_token_attends_as_the_last_of_its_sequence(window: int | None, slots: list[int]) -> None:
    qkv = rows(sum(LENGTHS), seed=1)
    shorter = [length - 1 for length in LENGTHS]
    cache = KeyValueCache(num_layers=1, num_slots=6, capacity=16)
    attend(all_but_last(qkv, LENGTHS), Packing(pack_lengths(shorter), cache, torch.tensor(slots)), window)
    decoded = attend(last_tokens(qkv, LENGTHS), decode_packing(cache, slots, shorter), window)
    expected = torch.stack([naive(*part, window=window)[-1] for part in split(qkv, LENGTHS)])
    torch.testing.assert_close(decoded, expected, atol=1e-5, rtol=1e-5)


def test_what_an_earlier_sequence_left_in_a_slot_does_not_reach_the_next() -> None:
    qkv = rows(sum(LENGTHS), seed=2)
    shorter = [length - 1 for length in LENGTHS]
    cache = KeyValueCache(num_layers=1, num_slots=4, capacity=16)
    for tensor in cache.of_layer(0, qkv[1][0].transpose(0, 1)):
        tensor.fill_(math.nan)
    slots = [0, 1, 2, 3]
    attend(all_but_last(qkv, LENGTHS), Packing(pack_lengths(shorter), cache, torch.tensor(slots)))
    decoded = attend(last_tokens(qkv, LENGTHS), decode_packing(cache, slots, shorter))
    expected = torch.stack([naive(*part)[-1] for part in split(qkv, LENGTHS)])
    torch.testing.assert_close(decoded, expected, atol=1e-5, rtol=1e-5)


def test_a_sequence_that_is_not_finite_leaves_the_others_alone() -> None:
    query, key, value = rows(sum(LENGTHS), seed=3)
    key[:, :, :5], value[:, :, :5] = math.nan, math.inf
    cache = KeyValueCache(num_layers=1, num_slots=4, capacity=16)
    prefilled = attend((query, key, value), Packing(pack_lengths(LENGTHS), cache, torch.arange(4)))
    decoded = attend(rows(4, seed=4), decode_packing(cache, [0, 1, 2, 3], LENGTHS))
    assert prefilled[:5].isnan().all() and prefilled[5:].isfinite().all()
    assert decoded[0].isnan().all() and decoded[1:].isfinite().all()


def test_copied_and_resized_slots_keep_their_content() -> None:
    qkv = rows(sum(LENGTHS), seed=5)
    cache = KeyValueCache(num_layers=1, num_slots=4, capacity=9)
    attend(qkv, Packing(pack_lengths(LENGTHS), cache, torch.arange(4)))
    before = decode_outputs(cache, slot=3, length=9, capacity=16)
    cache.copy_slot(3, [0, 2])
    assert torch.equal(decode_outputs(cache, slot=0, length=9, capacity=16), before)
    cache.resize(num_slots=3, capacity=12)
    assert cache.num_bytes() == 2 * 3 * KV_HEADS * 12 * HEAD_DIM * 4
    assert torch.equal(decode_outputs(cache, slot=2, length=9, capacity=16), before)
    assert not torch.equal(decode_outputs(cache, slot=1, length=9, capacity=16), before)


def decode_outputs(cache: KeyValueCache, slot: int, length: int, capacity: int) -> Tensor:
    """One token decoded against a copy of one slot."""
    keys, values = cache.of_layer(0, torch.empty(0))
    alone = KeyValueCache(num_layers=1, num_slots=1, capacity=capacity)
    for target, source in zip(alone.of_layer(0, keys[:, :, 0]), (keys, values), strict=True):
        target[0, :, :length] = source[slot, :, :length]
    return attend(rows(1, seed=6), decode_packing(alone, [0], [length]))


def test_equal_neighbours_are_one_group() -> None:
    groups = pack_lengths([5, 5, 3, 5])
    assert [(group.start, group.count, group.length) for group in groups] == [(0, 2, 5), (10, 1, 3), (13, 1, 5)]

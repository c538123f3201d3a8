"""Decode steps of latent attention by FlashMLA against our own form."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from trainhouse.workers.ops.attention_kind import AttentionKind, Sinks
from trainhouse.workers.ops.kv_cache import CachedRow, ContinuationChunk, DecodeStep, SlotTensors
from trainhouse.workers.ops.libraries.latent_attention import BLOCK, KEY_DIM, VALUE_DIM, FlashMla, flash_mla_on

from ...adapted import relative_error
from ..test_kv_cache import step
from .conftest import Install

HEADS, CAPACITY, LENGTHS, SLOTS = 3, 4 * BLOCK, [62, 5, 140], [3, 0, 2]
KIND = AttentionKind(1, KEY_DIM**-0.5, values_are_keys=True)
STEPS = 4

Attend = Callable[[DecodeStep, Tensor, Tensor], Tensor]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def begin(like: Tensor) -> DecodeStep:
    """Returns the next step of three sequences. The slot in between has NaN."""
    tensors = SlotTensors(CAPACITY)
    tensors.resize(4)
    keys, _ = tensors.of_layer(KIND.layer, like.new_empty(1, 1, KEY_DIM), values_are_keys=True)
    keys[1] = torch.nan
    for slot, length in zip(SLOTS, LENGTHS, strict=True):
        keys[slot, :, :length] = random(1, length, KEY_DIM, seed=slot).to(like)
    begun = step(tensors, SLOTS, LENGTHS)
    begun.slots, begun.lengths = begun.slots.to(like.device), begun.lengths.to(like.device)
    return begun


def decoded(attend: Attend, like: Tensor) -> list[Tensor]:
    """Returns the values that each of several steps attends to, which fill a block of one sequence and begin another,
    and the keys that are stored afterwards."""
    begun, outs = begin(like), []
    for number in range(STEPS):
        query, key = random(3, HEADS, KEY_DIM, seed=10 + number), random(3, 1, KEY_DIM, seed=20 + number)
        outs.append(attend(begun, query.to(like), key.to(like))[..., :VALUE_DIM])
        begun.advance()
    keys, _ = begun.tensors.of_layer(KIND.layer, like.new_empty(1, 1, KEY_DIM), values_are_keys=True)
    return [each.float().cpu() for each in (*outs, keys[SLOTS])]


def own_form(begun: DecodeStep, query: Tensor, key: Tensor) -> Tensor:
    return begun.attend(query, key, key, KIND)


@cache
def wanted() -> list[Tensor]:
    return decoded(own_form, torch.empty(0))


@pytest.mark.parametrize("name", ["latent", "early latent"])
def test_steps_by_the_interface_compute_the_same(name: str, install: Install) -> None:
    install(name)
    library = FlashMla()

    def attend(begun: DecodeStep, query: Tensor, key: Tensor) -> Tensor:
        return begun.attend_by(library, query, key, KIND)

    found = decoded(attend, torch.empty(0, dtype=torch.bfloat16))
    assert all(relative_error(one, other) < 1e-2 for one, other in zip(found, wanted(), strict=True))
    assert relative_error(found[0], wanted()[1]) > 0.5


def test_a_kind_is_latent_only_if_all_keys_are_seen_as_they_are() -> None:
    assert KIND.is_latent
    others = [{"values_are_keys": False}, {"window": 4}, {"cap": 5.0}, {"part": 8}, {"sinks": Sinks(torch.zeros(3))}]
    assert not any(replace(KIND, **other).is_latent for other in others)


@pytest.mark.parametrize(
    ("shape", "dtype", "capacity", "reason"),
    [
        ((3, 1, KEY_DIM), torch.bfloat16, CAPACITY, None),
        ((3, 1, KEY_DIM), torch.float32, CAPACITY, "float32"),
        ((3, 1, 320), torch.bfloat16, CAPACITY, "320"),
        ((3, 1, KEY_DIM), torch.bfloat16, 100, "100"),
    ],
)
def test_what_fits(shape: tuple[int, ...], dtype: torch.dtype, capacity: int, reason: str | None) -> None:
    found = FlashMla.misfit(torch.empty(shape, dtype=dtype), capacity)
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_steps_on_a_gpu_compute_the_same() -> None:
    pytest.importorskip("flash_mla", reason="FlashMLA is not installed")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashMLA's kernel needs compute capability 9.0")
    assert flash_mla_on(torch.empty(0, device="cuda").device) is not None
    found = decoded(own_form, torch.empty(0, dtype=torch.bfloat16, device="cuda"))
    assert all(relative_error(one, other) < 1e-2 for one, other in zip(found, wanted(), strict=True))
    assert relative_error(found[0], wanted()[1]) > 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_row_with_steps_and_a_chunk_on_a_gpu() -> None:
    """Heads of a step may return only values, those of a chunk return whole vectors."""
    query, key = random(5, HEADS, KEY_DIM, seed=10), random(5, 1, KEY_DIM, seed=20)
    outs: list[Tensor] = []
    for like in (torch.empty(0), torch.empty(0, dtype=torch.bfloat16, device="cuda")):
        begun = begin(like)
        chunk = ContinuationChunk(3, 5, begun.tensors, 1, 0)
        row = CachedRow([begun], [chunk], None, 5, ())
        outs.append(row.attend(query.to(like), key.to(like), key.to(like), KIND)[..., :VALUE_DIM].float().cpu())
    assert relative_error(outs[1], outs[0]) < 1e-2
    assert relative_error(outs[1].flip(0), outs[0]) > 0.5

"""Attention to cached keys and values against a naive softmax per sequence, and isolation of slots."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.ops.attention_kind import AttentionKind
from trainhouse.workers.ops.kernels import PrefixGroups
from trainhouse.workers.ops.kv_cache import CachedRow, ContinuationChunk, DecodeStep, NewSequences, SlotTensors

from .test_attention import (
    CAP,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LENGTHS,
    SINKS,
    WITH_CAP,
    WITH_SINKS,
    attend,
    naive,
    rows,
    split,
)

pytestmark = pytest.mark.usefixtures("either_way")

QKV = tuple[Tensor, Tensor, Tensor]
WINDOWS = [None, 4]
SHORTER = [length - 1 for length in LENGTHS]


def new_slot_tensors(num_slots: int = 6, capacity: int = 16) -> SlotTensors:
    tensors = SlotTensors(capacity)
    tensors.resize(num_slots)
    return tensors


def fresh(tensors: SlotTensors, lengths: Sequence[int], slots: Sequence[int], start: int = 0) -> CachedRow:
    """Returns a row of new sequences that go into these slots, after `start` other tokens."""
    packing, storing, sequence = Packing(pack_lengths(list(lengths))), [], 0
    for group in packing.groups:
        own = torch.tensor(slots[sequence : sequence + group.count])
        storing.append(NewSequences(start + group.start, group.count, group.length, tensors, own, sequence))
        sequence += group.count
    return CachedRow((), (), packing, start, storing)


def alone(num_rows: int) -> PrefixGroups:
    """Returns groups in which no two sequences share anything."""
    return PrefixGroups(torch.arange(num_rows), torch.arange(num_rows + 1), torch.zeros(num_rows, dtype=torch.int64))


def step(tensors: SlotTensors, slots: Sequence[int], lengths: Sequence[int], first: int = 0) -> DecodeStep:
    """Returns the step for the next token of the sequences in these slots, from token `first` of the packed row."""
    return DecodeStep(
        tensors=tensors,
        rows=slice(first, first + len(slots)),
        slots=torch.tensor(slots),
        in_order=list(slots) == list(range(len(slots))),
        lengths=torch.tensor(lengths),
        num_slots=max(slots) + 1,
        span=max(lengths) + 1,
        groups=alone(len(slots)),
    )


def decode(
    qkv: QKV,
    *steps: DecodeStep,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    return attend(qkv, CachedRow(steps, (), None, sum(len(one.slots) for one in steps), ()), window, sinks, cap)


def last_tokens(qkv: QKV) -> QKV:
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    query, key, value = (x[:, :, ends] for x in qkv)
    return query, key, value


def all_but_last(qkv: QKV) -> QKV:
    parts = split(qkv, LENGTHS)
    query, key, value = (torch.cat([part[i][:, :, :-1] for part in parts], dim=2) for i in range(3))
    return query, key, value


def expected_last(qkv: QKV, window: int | None = None, sinks: Tensor | None = None, cap: float | None = None) -> Tensor:
    return torch.stack([naive(*part, window=window, sinks=sinks, cap=cap)[-1] for part in split(qkv, LENGTHS)])


@WITH_CAP
@WITH_SINKS
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [2, 0, 3, 1], [5, 1, 2, 4]])
def test_a_decoded_token_attends_as_the_last_of_its_sequence(
    window: int | None, slots: list[int], sinks: Tensor | None, cap: float | None
) -> None:
    qkv, tensors = rows(sum(LENGTHS), seed=1), new_slot_tensors()
    attend(all_but_last(qkv), fresh(tensors, SHORTER, slots), window, sinks, cap)
    decoded = decode(last_tokens(qkv), step(tensors, slots, SHORTER), window=window, sinks=sinks, cap=cap)
    wanted = expected_last(qkv, window, sinks, cap)
    torch.testing.assert_close(decoded, wanted, atol=1e-5, rtol=1e-5)
    other_sinks, other_cap = SINKS if sinks is None else None, CAP if cap is None else None
    for other in (
        decoded.flip(0),
        expected_last(qkv, window, other_sinks, cap),
        expected_last(qkv, window, sinks, other_cap),
    ):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(other, wanted, atol=1e-5, rtol=1e-5)


def test_a_step_reads_slots_of_several_lengths() -> None:
    qkv, short, long = rows(sum(LENGTHS), seed=1), new_slot_tensors(2, 8), new_slot_tensors(2, 32)
    attend(_part(all_but_last(qkv), slice(0, sum(SHORTER[:2]))), fresh(short, SHORTER[:2], [1, 0]))
    attend(_part(all_but_last(qkv), slice(sum(SHORTER[:2]), None)), fresh(long, SHORTER[2:], [0, 1]))
    steps = step(short, [1, 0], SHORTER[:2]), step(long, [0, 1], SHORTER[2:], first=2)
    torch.testing.assert_close(decode(last_tokens(qkv), *steps), expected_last(qkv), atol=1e-5, rtol=1e-5)


def _part(qkv: QKV, tokens: slice) -> QKV:
    query, key, value = (x[:, :, tokens] for x in qkv)
    return query, key, value


@WITH_CAP
@WITH_SINKS
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("cuts", [(4, 9), (1, 2), (3, 4, 8)])
def test_a_sequence_in_chunks_attends_as_in_one_piece(
    window: int | None, cuts: tuple[int, ...], sinks: Tensor | None, cap: float | None
) -> None:
    qkv, tensors = rows(12, seed=8), new_slot_tensors()
    parts = [attend(_part(qkv, slice(0, cuts[0])), fresh(tensors, [cuts[0]], [3]), window, sinks, cap)]
    for start, stop in zip(cuts, (*cuts[1:], 12), strict=True):
        chunk = CachedRow((), [ContinuationChunk(0, stop - start, tensors, 3, start)], None, stop - start, ())
        parts.append(attend(_part(qkv, slice(start, stop)), chunk, window, sinks, cap))
    torch.testing.assert_close(torch.cat(parts), naive(*qkv, window, sinks, cap), atol=1e-5, rtol=1e-5)
    other_cap = CAP if cap is None else 1.001 * cap
    for other in (naive(*qkv, window, SINKS + 0.001, cap), naive(*qkv, window, sinks, other_cap)):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(torch.cat(parts), other, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@WITH_SINKS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_a_sequence_in_chunks_attends_as_in_one_piece_on_a_gpu(
    window: int | None, dtype: torch.dtype, sinks: Tensor | None
) -> None:
    """Runs flash attention on chunks that end within its blocks of 64 and 128 keys, and at their ends."""
    qkv, tensors = rows(300, seed=8), new_slot_tensors(capacity=320)
    halves = [x.cuda().to(dtype) for x in qkv]
    sinks_there = None if sinks is None else sinks.cuda()
    found, cuts = [], [0, 1, 64, 100, 256, 300]
    for start, stop in pairwise(cuts):
        length = stop - start
        row = CachedRow((), [ContinuationChunk(0, length, tensors, 3, start)], None, length, ())
        found.append(
            attend(
                (halves[0][:, :, start:stop], halves[1][:, :, start:stop], halves[2][:, :, start:stop]),
                row,
                window,
                sinks_there,
            )
        )
    query, key, value = (x.to(dtype).float() for x in qkv)
    error = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for sees, is_near in ((window, True), (20, False)):
        wanted = naive(query, key, value, window=sees, sinks=sinks)
        assert torch.allclose(torch.cat(found).cpu().float(), wanted, atol=error, rtol=error) == is_near


def test_one_row_mixes_decode_chunk_and_new_sequence() -> None:
    """The row has one decoded token, a chunk of three and a new sequence of five."""
    qkv, tensors = rows(22, seed=9), new_slot_tensors()
    decoded, chunked, new = _part(qkv, slice(0, 9)), _part(qkv, slice(9, 17)), _part(qkv, slice(17, 22))
    past = [_part(decoded, slice(0, 8)), _part(chunked, slice(0, 5))]
    attend(_joined(past), fresh(tensors, [8, 5], [0, 1]))
    now = [_part(decoded, slice(8, 9)), _part(chunked, slice(5, 8)), new]
    mixed = CachedRow(
        steps=[step(tensors, [0], [8])],
        chunks=[ContinuationChunk(1, 4, tensors, 1, 5)],
        fresh=Packing(pack_lengths([5])),
        fresh_start=4,
        storing=fresh(tensors, [5], [2], start=4).storing,
    )
    expected = torch.cat([naive(*decoded)[8:], naive(*chunked)[5:], naive(*new)])
    torch.testing.assert_close(attend(_joined(now), mixed), expected, atol=1e-5, rtol=1e-5)
    assert mixed.longest == 9
    keys, _ = tensors.of_layer(0, qkv[1][0].transpose(0, 1))
    assert torch.equal(keys[2, :, :5], new[1][0]) and not keys[2, :, 5:].any()


def _joined(parts: list[QKV]) -> QKV:
    query, key, value = (torch.cat([part[i] for part in parts], dim=2) for i in range(3))
    return query, key, value


def test_leftovers_in_a_slot_do_not_reach_the_next_sequence() -> None:
    qkv, tensors = rows(sum(LENGTHS), seed=2), new_slot_tensors(4)
    for tensor in tensors.of_layer(0, qkv[1][0].transpose(0, 1)):
        tensor.fill_(math.nan)
    slots = [0, 1, 2, 3]
    attend(all_but_last(qkv), fresh(tensors, SHORTER, slots))
    decoded = decode(last_tokens(qkv), step(tensors, slots, SHORTER))
    torch.testing.assert_close(decoded, expected_last(qkv), atol=1e-5, rtol=1e-5)


@WITH_SINKS
def test_nonfinite_sequence_leaves_the_others_alone(sinks: Tensor | None) -> None:
    query, key, value = rows(sum(LENGTHS), seed=3)
    key[:, :, :5], value[:, :, :5] = math.nan, math.inf
    tensors = new_slot_tensors(4)
    prefilled = attend((query, key, value), fresh(tensors, LENGTHS, [0, 1, 2, 3]), sinks=sinks)
    decoded = decode(rows(4, seed=4), step(tensors, [0, 1, 2, 3], LENGTHS), sinks=sinks)
    assert prefilled[:5].isnan().all() and prefilled[5:].isfinite().all()
    assert decoded[0].isnan().all() and decoded[1:].isfinite().all()


def test_copied_and_resized_slots_keep_their_content() -> None:
    qkv, tensors = rows(sum(LENGTHS), seed=5), new_slot_tensors(4, capacity=9)
    attend(qkv, fresh(tensors, LENGTHS, [0, 1, 2, 3]))
    before = outputs(tensors, slot=3)
    tensors.copy_slot(3, tensors, 0)
    assert torch.equal(outputs(tensors, slot=0), before)
    longer = new_slot_tensors(2, capacity=20)
    for tensor in longer.of_layer(0, qkv[1][0].transpose(0, 1)):
        tensor.fill_(math.nan)
    tensors.copy_slot(3, longer, 1)
    assert torch.equal(outputs(longer, slot=1), before)
    tensors.resize(3)
    assert tensors.num_bytes() == 2 * 3 * KV_HEADS * 9 * HEAD_DIM * 4
    assert torch.equal(outputs(tensors, slot=0), before)
    assert not torch.equal(outputs(tensors, slot=1), before)


def outputs(tensors: SlotTensors, slot: int) -> Tensor:
    """Decodes one token against a copy of a slot that has nine tokens."""
    alone = new_slot_tensors(1, capacity=24)
    tensors.copy_slot(slot, alone, 0)
    return decode(rows(1, seed=6), step(alone, [0], [9]))


@WITH_CAP
@WITH_SINKS
@pytest.mark.parametrize("window", WINDOWS)
def test_bfloat16_stays_within_its_rounding(window: int | None, sinks: Tensor | None, cap: float | None) -> None:
    qkv, tensors = rows(sum(LENGTHS), seed=1), new_slot_tensors()
    low = tuple(x.bfloat16() for x in qkv)
    attend(all_but_last((low[0], low[1], low[2])), fresh(tensors, SHORTER, [0, 1, 2, 3]), window, sinks, cap)
    last = step(tensors, [0, 1, 2, 3], SHORTER)
    decoded = decode(last_tokens((low[0], low[1], low[2])), last, window=window, sinks=sinks, cap=cap)
    assert decoded.shape == (4, HEADS, HEAD_DIM)
    torch.testing.assert_close(decoded.float(), expected_last(qkv, window, sinks, cap), atol=0.05, rtol=0.05)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(decoded.float(), expected_last(qkv, window, sinks, cap), atol=1e-5, rtol=1e-5)


def test_keys_that_an_earlier_layer_stored_are_not_stored_again() -> None:
    tensors, kind = new_slot_tensors(), AttentionKind(0, 1.0)
    query, key, value = (torch.randn(5, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    fresh(tensors, [5], [1]).attend(query, key, value, kind)
    stored = [each.clone() for each in tensors.tensors()]
    continued = CachedRow((), [ContinuationChunk(0, 1, tensors, slot=1, cached=4)], None, 1, ())
    for row, number in ((fresh(tensors, [5], [1]), 5), (continued, 1)):
        others = query[:number], -key[:number], -value[:number]
        row.attend(*others, replace(kind, is_stored=True))
        assert all(map(torch.equal, tensors.tensors(), stored))
        row.attend(*others, kind)
        assert not any(map(torch.equal, tensors.tensors(), stored))
        fresh(tensors, [5], [1]).attend(query, key, value, kind)

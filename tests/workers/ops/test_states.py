"""Recurrent states in slots, against the recurrence over each whole sequence."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.ops.attention_kind import AttentionKind
from trainhouse.workers.ops.kv_cache import CachedRow, ContinuationChunk, SlotTensors

from ..moving_sum import MovingSum
from .test_attention import rows
from .test_kv_cache import fresh, new_slot_tensors, step

OP = MovingSum(width=4)
CPU = torch.device("cpu")


def sequence(length: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, 4, generator=generator), torch.rand(length, 1, generator=generator)]


def whole(inputs: Sequence[Tensor]) -> Tensor:
    return OP.scan(inputs, Packing(pack_lengths([len(inputs[0])])))[0]


def part(inputs: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    return [x[start:stop] for x in inputs]


def packed(*sequences: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*sequences, strict=True)]


def decode(inputs: Sequence[Tensor], tensors: SlotTensors, slots: Sequence[int]) -> Tensor:
    one = step(tensors, slots, [0] * len(slots))
    return CachedRow([one], (), None, len(slots), ()).recur(OP, inputs)


def begin(tensors: SlotTensors, slots: Sequence[int], *sequences: Sequence[Tensor]) -> Tensor:
    return fresh(tensors, [len(each[0]) for each in sequences], slots).recur(OP, packed(*sequences))


@pytest.mark.parametrize("slots", [[0, 1, 2], [4, 0, 2]])
def test_steps_continue_from_the_states_of_new_sequences(slots: list[int]) -> None:
    tensors, sequences = new_slot_tensors(), [sequence(length, length) for length in (5, 5, 3)]
    found = begin(tensors, slots, *(part(each, 0, len(each[0]) - 2) for each in sequences))
    torch.testing.assert_close(found, torch.cat([whole(each)[:-2] for each in sequences]))
    for left in (2, 1):
        last = [part(each, len(each[0]) - left, len(each[0]) - left + 1) for each in sequences]
        found = decode(packed(*last), tensors, slots)
        torch.testing.assert_close(found, torch.stack([whole(each)[-left] for each in sequences]))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.roll(1, 0), torch.stack([whole(each)[-1] for each in sequences]))


def test_a_new_sequence_does_not_continue_from_the_one_that_left_its_slot() -> None:
    tensors = new_slot_tensors()
    tensors.states(OP.state, CPU).fill_(math.nan)
    new = sequence(4, 1)
    begin(tensors, [3], part(new, 0, 3))
    torch.testing.assert_close(decode(part(new, 3, 4), tensors, [3])[0], whole(new)[3])


def test_a_row_mixes_steps_chunks_of_two_lengths_of_slots_and_new_sequences() -> None:
    short, long = new_slot_tensors(), new_slot_tensors(capacity=32)
    stepped, first, second, new = (sequence(length, length) for length in (6, 7, 8, 3))
    begin(short, [2, 0], part(stepped, 0, 5), part(first, 0, 4))
    begin(long, [1], part(second, 0, 2))
    row = CachedRow(
        steps=[step(short, [2], [5])],
        chunks=[ContinuationChunk(1, 4, short, 0, 4), ContinuationChunk(4, 10, long, 1, 2)],
        fresh=Packing(pack_lengths([3])),
        fresh_start=10,
        storing=fresh(short, [3], [4], start=10).storing,
    )
    found = row.recur(OP, packed(part(stepped, 5, 6), part(first, 4, 7), part(second, 2, 8), new))
    wanted = torch.cat([whole(stepped)[5:], whole(first)[4:], whole(second)[2:], whole(new)])
    torch.testing.assert_close(found, wanted)
    assert not row.pending
    for tensors, slot, each in ((short, 2, stepped), (short, 0, first), (long, 1, second), (short, 4, new)):
        torch.testing.assert_close(tensors.states(OP.state, CPU)[slot], whole(each)[-1])


def test_new_sequences_without_a_slot_leave_the_states_of_others() -> None:
    tensors, kept, other = new_slot_tensors(), sequence(3, 3), sequence(5, 5)
    begin(tensors, [0], kept)
    row = fresh(tensors, [5, 3], [0, 1])
    storing = [replace(each, slots=torch.tensor([1])) for each in row.storing if each.length == 3]
    replace(row, storing=storing).recur(OP, packed(other, kept))
    states = tensors.states(OP.state, CPU)
    torch.testing.assert_close(states[:2], whole(kept)[-1].expand(2, -1))


def test_draft_tokens_leave_the_state_before_them_and_their_inputs() -> None:
    tensors, drafted, plain = new_slot_tensors(), sequence(9, 9), sequence(6, 6)
    begin(tensors, [1, 2], part(drafted, 0, 5), part(plain, 0, 4))
    chunks = [
        ContinuationChunk(0, 2, tensors, 2, 4),
        ContinuationChunk(2, 6, tensors, 1, 5, is_draft=True),
    ]
    row = CachedRow((), chunks, None, 6, ())
    found = row.recur(OP, packed(part(plain, 4, 6), part(drafted, 5, 9)))
    torch.testing.assert_close(found, torch.cat([whole(plain)[4:], whole(drafted)[5:]]))
    states, (pending,) = tensors.states(OP.state, CPU), row.pending
    torch.testing.assert_close(states[1:3], torch.stack([whole(drafted)[4], whole(plain)[5]]))
    for mine, wanted in zip(pending.inputs, part(drafted, 5, 9), strict=True):
        assert torch.equal(mine, wanted)


def test_copied_and_resized_slots_keep_their_states() -> None:
    tensors, target, one = new_slot_tensors(), new_slot_tensors(2, 32), sequence(4, 1)
    begin(tensors, [3], one)
    tensors.copy_slot(3, tensors, 0)
    tensors.copy_slot(3, target, 1)
    tensors.resize(2)
    assert torch.equal(tensors.states(OP.state, CPU)[0], whole(one)[-1])
    assert torch.equal(target.states(OP.state, CPU)[1], whole(one)[-1])
    assert torch.equal(target.state_copies(1)[OP.state], whole(one)[-1])
    tensors.resize(5)
    assert not tensors.states(OP.state, CPU)[2:].any()
    assert tensors.num_bytes() == 5 * 4 * 4 and [len(each) for each in tensors.tensors()] == [5]


def test_layers_may_have_keys_or_states_or_neither() -> None:
    """Layer 0 has states, layer 2 keys and values, layer 1 nothing."""
    _, key, value = (x[0].transpose(0, 1) for x in rows(4, seed=1))
    tensors, target = new_slot_tensors(), new_slot_tensors(2, 32)
    begin(tensors, [3], sequence(4, 1))
    fresh(tensors, [4], [3]).storing[0].store(key, value, AttentionKind(2, 1.0))
    tensors.copy_slot(3, target, 0)
    copies = target.copies(0, slice(0, 4))
    assert list(copies) == [2]
    torch.testing.assert_close(copies[2][0], key.transpose(0, 1))
    assert len(list(tensors.tensors())) == len(list(target.tensors())) == 3

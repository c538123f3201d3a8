"""The memory that layers are gathered into; that what they compute stays right is test_layouts.py's."""

import torch
from trainhouse.workers.models.fsdp import GatherBuffers


def test_what_a_layer_gives_back_is_taken_by_the_next_of_its_size() -> None:
    buffers, like = GatherBuffers(), torch.zeros(3, dtype=torch.bfloat16)
    one, other = buffers.take(like, 8), buffers.take(like, 8)
    assert one.dtype == like.dtype and one.shape == other.shape == (8,)
    assert one.data_ptr() != other.data_ptr(), "both are in use"
    buffers.release(one)
    larger = buffers.take(like, 9)
    assert len(larger) == 9
    assert buffers.take(like, 8) is one
    buffers.release(other)
    assert buffers.take(like, 8) is other


def test_two_are_kept_at_most_and_none_after_a_pass() -> None:
    buffers, like = GatherBuffers(), torch.zeros(1)
    first, second, third = (buffers.take(like, 4) for _ in range(3))
    for each in (first, second, third):
        buffers.release(each)
    taken = [buffers.take(like, 4) for _ in range(3)]
    assert [any(each is kept for kept in taken) for each in (first, second, third)] == [False, True, True]
    buffers.release(second)
    buffers.clear()
    assert buffers.take(like, 4) is not second

"""The buffers that FSDP layers are gathered into; test_layouts.py checks what they compute."""

import torch
from trainhouse.workers.models.fsdp import GatherBuffers


def test_released_buffers_are_reused_for_the_same_size() -> None:
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


def test_at_most_two_buffers_are_kept_and_none_after_clear() -> None:
    buffers, like = GatherBuffers(), torch.zeros(1)
    first, second, third = (buffers.take(like, 4) for _ in range(3))
    for each in (first, second, third):
        buffers.release(each)
    taken = [buffers.take(like, 4) for _ in range(3)]
    assert [any(each is kept for kept in taken) for each in (first, second, third)] == [False, True, True]
    buffers.release(second)
    buffers.clear()
    assert buffers.take(like, 4) is not second

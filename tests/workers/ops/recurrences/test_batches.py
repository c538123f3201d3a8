"""Batches of sequences of similar length hold each token once, in order, and zeros else."""

import pytest
import torch
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.ops.recurrences.state_space import Batches

from .cases import normal


def batches_of(lengths: list[int]) -> Batches:
    return Batches(Packing(pack_lengths(lengths)), torch.device("cpu"), 0)


@pytest.mark.parametrize("lengths", [[3], [4, 4, 4], [1, 9, 5, 4, 2, 1, 20], [8, 7, 6, 4, 3], [1, 1, 2]])
def test_tokens_and_gradients_return_to_their_places(lengths: list[int]) -> None:
    batches, x = batches_of(lengths), normal(sum(lengths), 2, 3, seed=1).requires_grad_()
    parts = batches.split(x)
    assert [part.shape[:2] for part in parts] == batches.shapes
    assert all(2 * sum(lengths) >= part.shape[0] * part.shape[1] for part in parts)
    rows = sorted(((len(row), row) for row in x.split(lengths)), key=lambda pair: -pair[0])
    for (length, row), own in zip(rows, [own for part in parts for own in part], strict=True):
        assert torch.equal(own[:length], row)
        assert not own[length:].any()
    weights = normal(*x.shape, seed=2)
    joined = batches.join([2 * part for part in parts])
    assert torch.equal(joined, 2 * x)
    assert torch.equal(torch.autograd.grad(joined, x, weights)[0], 2 * weights)


def test_states_return_to_their_sequences() -> None:
    batches, states = batches_of([1, 9, 5, 4, 2, 1, 20]), normal(7, 2, seed=3)
    parts = batches.split_states(states)
    assert [len(part) for part in parts] == [count for count, _ in batches.shapes]
    assert torch.equal(parts[0], states[[6]])
    assert torch.equal(batches.join_states(parts), states)


def test_a_row_of_equal_lengths_is_one_batch_in_place() -> None:
    x = normal(12, 2, seed=4)
    (part,) = batches_of([4, 4, 4]).split(x)
    assert part.data_ptr() == x.data_ptr()
    (shuffled,) = batches_of([3, 4]).split(x[:7])
    assert shuffled.data_ptr() != x.data_ptr()


def test_at_most_half_of_a_batch_is_filled_up() -> None:
    assert batches_of([1, 9, 5, 4, 2, 1, 20]).shapes == [(1, 20), (2, 9), (2, 4), (2, 1)]

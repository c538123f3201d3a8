"""Packing of operations into micro-batches without padding, and outputs in the client's order."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from trainhouse.workers.batch.micro_batch import (
    Lane,
    MicroBatch,
    best_fit_bins,
    distribute,
    in_shape_of,
    pack,
    smaller_budget,
)
from trainhouse.workers.batch.validated import ModelLimits, ValidatedBatch
from trainhouse.workers.training.batch_failure import out_of_memory_message

from ..requests import read, sampled, supervised

CPU = torch.device("cpu")


def batches_of(lanes: list[Lane]) -> list[MicroBatch]:
    return [micro_batch for lane in lanes for micro_batch in lane.micro_batches]


@pytest.mark.parametrize("budget", [1, 7, 12, 1000])
def test_packing_pads_nothing_and_keeps_to_the_budget(budget: int) -> None:
    lengths = (3, 9, 3, 1, 5, 9, 2)
    operation = read(*map(supervised, lengths))
    batches = batches_of(pack([operation], budget, CPU))
    assert sum(len(batch.tokens) for batch in batches) == sum(lengths)
    assert all(len(batch.tokens) <= max(budget, 9) for batch in batches)
    assert budget < 1000 or len(batches) == 1
    for batch in batches:
        (segment,) = batch.segments
        assert (segment.start, segment.stop) == (0, len(batch.tokens))
        for example, start, stop in zip(segment.examples, segment.bounds, segment.bounds[1:], strict=False):
            expected = operation.examples[example]
            (objective,) = batch.objectives
            assert batch.tokens[start:stop].tolist() == expected.tokens.tolist()
            assert batch.positions[start:stop].tolist() == list(range(len(expected.tokens)))
            assert objective.targets[start:stop].tolist() == expected.targets.tolist()


def test_equal_lengths_attend_as_one_group() -> None:
    (batch,) = batches_of(pack([read(*map(supervised, (3, 9, 3, 9, 3)))], 1000, CPU))
    assert [(group.count, group.length) for group in batch.packing.groups] == [(2, 9), (3, 3)]


def outputs_of(batches: list[MicroBatch], operations: list[ValidatedBatch]) -> list[list[np.ndarray | None]]:
    """Returns the targets as outputs, in the order of the operations' data."""
    collected: list[list[np.ndarray | None]] = [[None] * len(operation.examples) for operation in operations]
    for batch in batches:
        for segment in batch.segments:
            (objective,) = (each for each in batch.objectives if segment in each.segments)
            targets = objective.targets[segment.start - objective.start : segment.stop - objective.start]
            for example, (start, stop) in zip(segment.examples, pairwise(segment.bounds), strict=True):
                expected = operations[segment.operation].examples[example].targets
                collected[segment.operation][example] = in_shape_of(expected, targets[start:stop].numpy())
    return collected


def test_outputs_have_the_order_and_shape_of_the_data() -> None:
    two_dimensional = [
        supervised(n, target_tokens=np.arange(n * k).reshape(n, k), weights=np.ones((n, k)))
        for n, k in ((2, 3), (5, 1))
    ]
    operations = [read(*map(supervised, (3, 9, 4))), read(two_dimensional[0], supervised(4), two_dimensional[1])]
    collected = outputs_of(batches_of(pack(operations, 8, CPU)), operations)
    for operation, outputs in zip(operations, collected, strict=True):
        for example, output in zip(operation.examples, outputs, strict=True):
            assert output is not None
            np.testing.assert_array_equal(output, example.targets)


def test_several_operations_share_a_micro_batch_in_segments() -> None:
    operations = [read(*map(supervised, (3, 5))), read(sampled(4), sampled(4), loss_fn="ppo"), read(supervised(2))]
    (batch,) = batches_of(pack(operations, 1000, CPU))
    spans = [(segment.operation, segment.start, segment.stop) for segment in batch.segments]
    assert spans == [(0, 0, 8), (1, 8, 16), (2, 16, 18)]
    assert [set(objective.inputs) >= {"weights"} for objective in batch.objectives] == [True, False, True]
    assert [(objective.start, objective.stop) for objective in batch.objectives] == [(0, 8), (8, 16), (16, 18)]


def test_adjacent_examples_with_one_loss_are_one_objective() -> None:
    operations = [read(*map(supervised, (3, 5))), read(supervised(4)), read(supervised(4), weight=0.5)]
    (batch,) = batches_of(pack(operations, 1000, CPU))
    assert [(objective.start, objective.stop) for objective in batch.objectives] == [(0, 12), (12, 16)]
    assert batch.objectives[0].bounds == (0, 5, 8, 12)
    assert batch.objectives[0].targets.tolist() == [
        token for i, j in ((0, 1), (0, 0), (1, 0)) for token in operations[i].examples[j].targets.tolist()
    ]
    assert [each.operation for each in batch.objectives[0].segments] == [0, 1]


def unused(bins: list[list[int]], lengths: np.ndarray, budget: int) -> float:
    """Returns the share of all micro-batches' token budgets that is not filled."""
    return 1 - lengths.sum() / (len(bins) * budget)


def next_fit(lengths: np.ndarray, budget: int) -> list[list[int]]:
    """Packs the longest first and opens a new bin whenever the last has no room: the simplest packing."""
    bins: list[list[int]] = [[]]
    for i in np.argsort(-lengths):
        if lengths[bins[-1]].sum() + lengths[i] > budget:
            bins.append([])
        bins[-1].append(int(i))
    return bins


MIXES = {
    "16 to 256": lambda random: random.integers(16, 257, 600),
    "8 to 512, log-uniform": lambda random: np.exp(random.uniform(np.log(8), np.log(512), 600)).astype(int),
    "chats": lambda random: np.clip(random.lognormal(5.5, 0.8, 400), 8, 2048).astype(int),
    "two lengths": lambda random: random.choice([384, 640], 200),
}


@pytest.mark.parametrize("budget", [1024, 4096])
@pytest.mark.parametrize("mix", MIXES)
def test_mixed_lengths_leave_less_than_a_tenth_of_the_budget_unused(mix: str, budget: int) -> None:
    lengths = np.minimum(MIXES[mix](np.random.default_rng(1)), budget)
    bins = best_fit_bins(lengths.tolist(), budget)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(lengths[members].sum() <= budget for members in bins)
    assert unused(bins, lengths, budget) < 0.1


def test_next_fit_packing_leaves_more_unused() -> None:
    lengths = np.minimum(MIXES["chats"](np.random.default_rng(1)), 1024)
    assert unused(next_fit(lengths, 1024), lengths, 1024) > 0.1


def test_a_sequence_longer_than_the_budget_runs_alone() -> None:
    assert best_fit_bins([3, 12, 4], budget=10) == [[1], [2, 0]]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("max_lanes", [2, 4])
def test_lanes_get_equal_work_and_share_the_budget(mix: str, max_lanes: int) -> None:
    budget = 8192
    lengths = MIXES[mix](np.random.default_rng(1)).tolist()
    lanes = distribute(lengths, budget, max_lanes)
    assert len(lanes) == max_lanes
    assert sorted(i for bins in lanes for members in bins for i in members) == list(range(len(lengths)))
    tokens = [[sum(lengths[i] for i in members) for members in bins] for bins in lanes]
    assert max(map(max, tokens)) <= budget // max_lanes
    assert max(map(sum, tokens)) < 1.02 * min(map(sum, tokens))
    assert all(len(each) <= 1.1 * sum(lengths) / budget + 1 for each in tokens)


def test_short_or_indivisible_work_has_fewer_lanes() -> None:
    assert distribute([100, 100], 4096, 2) == [[[0, 1]]]
    assert distribute([4000], 4096, 2) == [[[0]]]
    assert len(distribute([2000, 2000], 4096, 2)) == 2
    assert len(distribute([2100, 2000], 4096, 2)) == 1  # no room for both at once in half the budget each
    assert len(distribute([1100, *[100] * 40], 4096, 4)) == 3
    assert distribute([], 4096, 4) == [[]]


def test_lanes_list_the_operations_of_their_examples() -> None:
    limits = ModelLimits(vocab_size=1000, max_context_length=300)
    operations = [read(supervised(300), limits=limits), read(supervised(140), supervised(150), limits=limits)]
    lanes = pack(operations, 4096, CPU, max_lanes=2)
    assert [lane.operations for lane in lanes] == [{0}, {1}]


def test_out_of_memory_budgets_halve_down_to_the_longest_example() -> None:
    operation = read(*map(supervised, (5, 16, 9, 2)))
    budgets = [4096]
    while smaller := smaller_budget(operation, budgets[-1]):
        budgets.append(smaller)
    assert budgets == [4096, 16]
    assert smaller_budget(read(*[supervised(4)] * 16), 4096) == 32
    assert smaller_budget(read(supervised(4)), 4096) is None
    without_examples = replace(read(supervised(4)), examples=(), datum_indices=())
    assert smaller_budget(without_examples, 4096) is None
    assert "no room for gradients" in out_of_memory_message(without_examples, 4096, 4096, torch.device("cpu"))

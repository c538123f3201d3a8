"""Tests rows of decode steps that other sequences take over, with graphs that compute again instead of replaying."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from trainhouse.workers.protocol.calls import SampleJob, SamplingSlice
from trainhouse.workers.sampler.decode_steps import StepGraph
from trainhouse.workers.sampler.engine import SamplingEngine

from ...drawn import assert_same_sample
from ...tiny import tiny_model
from ..adapted import Adapted
from .test_sampler import finish, job, new_sampler, prompt

ADAPTERS = (None, "one", "other")
LENGTHS = (5, 9, 14, 20, 31, 38, 40, 40, 40)


class Graphs:
    """Stands in for StepGraphs."""

    def __init__(self) -> None:
        self.num_recorded = self.num_repeated = 0

    def new(self) -> StepGraph:
        return Recomputed(self)


class Recomputed(StepGraph):
    def __init__(self, graphs: Graphs) -> None:
        self.can_repeat, self._counts = True, graphs

    def record(self, compute: Callable[[], Tensor]) -> Tensor:
        self._compute = compute
        self._counts.num_recorded += 1
        return compute()

    def repeat(self) -> Tensor:
        self._counts.num_repeated += 1
        return self._compute()


@pytest.fixture(scope="module", params=["qwen3", "mistral", "qwen3_5", "qwen3_moe"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    adapted = Adapted(tiny_model(request.param, tmp_path_factory.mktemp(request.param)))
    for name in ADAPTERS[1:]:
        adapted.create(name)
    return adapted


def jobs_of(name: str, lengths: Sequence[int]) -> list[SampleJob]:
    """Alternates between the adapters."""
    return [
        job(f"{name}{n}", prompt(12, seed=n), ADAPTERS[n % 3], max_tokens=length, seed=n)
        for n, length in enumerate(lengths)
    ]


def with_graphs(adapted: Adapted) -> tuple[SamplingEngine, Graphs]:
    sampler, graphs = new_sampler(adapted), Graphs()
    sampler._runner.graphs = graphs  # type: ignore[assignment]
    return sampler, graphs


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, answer in wanted.items():
        (one,), (other,) = found[name].sequences, answer.sequences
        assert_same_sample(one, other)


def test_sequences_that_end_leave_idle_rows(adapted: Adapted) -> None:
    wanted = finish(new_sampler(adapted), *jobs_of("job", LENGTHS))
    sampler, graphs = with_graphs(adapted)
    assert_same(finish(sampler, *jobs_of("job", LENGTHS)), wanted)
    # Nine sequences end at seven times; rows are new when fewer than half are busy, or a slot is outgrown.
    assert graphs.num_recorded <= 3 and graphs.num_repeated >= 25


def test_sequences_that_join_take_over_idle_rows(adapted: Adapted) -> None:
    first, later = jobs_of("job", (4, 4, 4, 30, 30, 30)), jobs_of("later", (20, 20, 20))
    wanted = finish(new_sampler(adapted), *first) | finish(new_sampler(adapted), *later)
    sampler, graphs = with_graphs(adapted)
    found = dict(sampler.slice(SamplingSlice(tuple(first), (), 0)).finished)
    while len(found) < 3:
        found |= sampler.slice(SamplingSlice((), (), 0)).finished
    num_recorded = graphs.num_recorded
    assert_same(found | finish(sampler, *later), wanted)
    assert graphs.num_recorded == num_recorded and graphs.num_repeated >= 20


def test_idle_rows_do_not_touch_slots_that_other_samplers_take(adapted: Adapted) -> None:
    """Rows are dropped once their pool has no unused slot."""
    sampler, _ = with_graphs(adapted)
    jobs = jobs_of("job", (4, 4, 4, 40, 40, 40))
    wanted = finish(new_sampler(adapted), *jobs)
    found = dict(sampler.slice(SamplingSlice(tuple(jobs), (), 0)).finished)
    while len(found) < 3:
        found |= sampler.slice(SamplingSlice((), (), 0)).finished
    found |= sampler.slice(SamplingSlice((), (), 0)).finished
    rows = sampler._runner._steps
    assert rows is not None and rows.is_current
    (pool,) = {id(each): each for each in sampler._scheduler.slots.cache._pools.values() if each.occupants}.values()
    free = slice(len(pool.occupants), pool.tensors.num_slots)
    others = [torch.full_like(each[free], 7.0) for each in pool.tensors.tensors()]
    for each, other in zip(pool.tensors.tensors(), others, strict=True):
        each[free] = other
    taken = [object()] * pool.num_free
    pool.occupants += taken  # type: ignore[arg-type]
    assert not rows.is_current
    for _ in range(5):
        found |= sampler.slice(SamplingSlice((), (), 0)).finished
    for each, other in zip(pool.tensors.tensors(), others, strict=True):
        assert torch.equal(each[free], other)
    del pool.occupants[-len(taken) :]
    assert_same(found | finish(sampler), wanted)

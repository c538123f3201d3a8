"""Lanes: work in parallel threads, and whole passes in them."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.protocol.calls import Failure, OperationPart, RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.resources.threads import Lanes, current_lane
from trainhouse.workers.worker.worker import Worker

from ..model_state import pending_gradients
from ..requests import repeatable, supervised

WAIT_SECONDS = 30
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_lanes_run_in_parallel_with_a_share_of_the_threads() -> None:
    together = threading.Barrier(2)
    seen = {}

    def work(name: str) -> None:
        together.wait(WAIT_SECONDS)
        seen[name] = (current_lane(), torch.get_num_threads())

    Lanes(CPU).run(work, [["first"], ["second"]])
    assert seen == {"first": (0, 2), "second": (1, 2)}
    assert torch.get_num_threads() == 4


def test_single_lane_has_all_threads() -> None:
    seen = []
    Lanes(CPU).run(lambda item: seen.append((item, torch.get_num_threads())), [["one", "two"]])
    assert seen == [("one", 4), ("two", 4)]


@pytest.mark.parametrize("failing", [0, 1])
def test_error_is_raised_after_all_lanes_have_ended(failing: int) -> None:
    ended = []

    def work(lane: int) -> None:
        if lane == failing:
            raise ZeroDivisionError
        ended.append(lane)

    with pytest.raises(ZeroDivisionError):
        Lanes(CPU).run(work, [[0], [1]])
    assert ended == [1 - failing]
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("failing", [0, 1])
def test_memory_of_lanes_is_freed_with_the_error(failing: int) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def work(lane: int) -> None:
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        if lane == failing:
            raise ZeroDivisionError

    lanes = Lanes(CPU)
    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError):
            lanes.run(work, [[0], [1]])
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_no_thread_is_started_during_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that cannot be started would leave its work in the queue for another pass."""
    lanes = Lanes(CPU)
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
    lanes.run(lambda item: None, [[item] for item in range(lanes.num_lanes)])


def test_three_lanes_share_four_threads() -> None:
    seen = {}

    def work(lane: int) -> None:
        seen[lane] = torch.get_num_threads()

    Lanes(CPU).run(work, [[0], [1], [2]])
    assert seen == {0: 2, 1: 1, 2: 1}


def test_other_devices_have_one_lane() -> None:
    assert Lanes(torch.device("cuda")).num_lanes == 1


@pytest.fixture(scope="module")
def workers(tiny_models: dict[str, Path]) -> dict[int, Worker]:
    """Maps a number of threads to a worker with as many lanes."""
    model = ServedModel("tiny", str(tiny_models["qwen3"]))
    return {threads: Worker(WorkerConfig(model, threads=threads)) for threads in (1, 2)}


RUNS = {"a": 4, "b": 8, "c": 4}


def pass_of_three_runs(
    workers: Mapping[int, Worker], threads: int, spoil: str | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the answers and gradients of a pass. spoil: the run whose losses overflow."""
    torch.set_num_threads(threads)
    worker = workers[threads]
    parts = []
    for i, (run_id, rank) in enumerate(RUNS.items()):
        worker.create_run(RunSpec(run_id, LoraConfig(rank=rank, seed=i)))
        lengths = [60 + 20 * j + 7 * i for j in range(2 + i)]
        weight = 3e38 if run_id == spoil else 0.5
        data = tuple(supervised(length, weights=np.full(length, weight)) for length in lengths)
        parts.append(OperationPart(i, ForwardBackwardRequest(run_id, 1, data, "cross_entropy")))
    answers = dict(zip(RUNS, worker.run_pass(tuple(parts)), strict=True))
    gradients = {run_id: pending_gradients(worker, run_id) for run_id in RUNS if run_id != spoil}
    for run_id in RUNS:
        worker.drop_run(run_id)
    return answers, gradients


def test_two_lanes_match_one_lane(workers: dict[int, Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    num_lanes = []
    run = Lanes.run

    def recorded(self: Lanes, function: Any, lanes: Sequence[Any]) -> None:
        num_lanes.append(len(lanes))
        run(self, function, lanes)

    monkeypatch.setattr(Lanes, "run", recorded)
    (one, one_gradients), (two, two_gradients) = (pass_of_three_runs(workers, threads) for threads in (1, 2))
    assert num_lanes == [1, 2]
    for run_id in RUNS:
        mine, theirs = one[run_id], two[run_id]
        assert isinstance(mine, ForwardBackwardOutput) and isinstance(theirs, ForwardBackwardOutput)
        assert repeatable(mine.metrics) == pytest.approx(repeatable(theirs.metrics), rel=1e-6)
        for a, b in zip(mine.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-5)
        torch.testing.assert_close(one_gradients[run_id], two_gradients[run_id], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(one_gradients[run_id], 0.999 * two_gradients[run_id], rtol=1e-4, atol=1e-5)


def test_repeated_pass_is_bit_identical(workers: dict[int, Worker]) -> None:
    (first, first_gradients), (second, second_gradients) = (pass_of_three_runs(workers, 2) for _ in range(2))
    for run_id in RUNS:
        assert torch.equal(first_gradients[run_id], second_gradients[run_id])
        assert repeatable(first[run_id].metrics) == repeatable(second[run_id].metrics)


def test_failure_in_one_lane_leaves_the_others_unchanged(workers: dict[int, Worker]) -> None:
    answers, gradients = pass_of_three_runs(workers, 2)
    spoiled, spoiled_gradients = pass_of_three_runs(workers, 2, spoil="b")
    assert isinstance(spoiled["b"], Failure)
    for run_id in spoiled_gradients:
        assert repeatable(spoiled[run_id].metrics) == repeatable(answers[run_id].metrics)
        assert torch.equal(spoiled_gradients[run_id], gradients[run_id])

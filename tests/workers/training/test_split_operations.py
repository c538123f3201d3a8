"""Tests that an operation split over several passes equals one pass, is all or nothing, and ends with its run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.lora import Adapter
from trainhouse.workers.losses import LOSSES, LossOutput
from trainhouse.workers.protocol.calls import Failure, OperationPart, OptimizerStep, PartAnswer, RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.training.pass_runner import rounds
from trainhouse.workers.worker.worker import Worker

from ..model_state import pending_gradients, pending_window
from ..requests import repeatable

LORA = LoraConfig(rank=4, seed=1)
SIZES = (2, 3, 1)
"""Number of data in each part."""


@pytest.fixture(scope="module")
def config(tiny_models: dict[str, Path]) -> WorkerConfig:
    return WorkerConfig(ServedModel("tiny", str(tiny_models["qwen3"])), device="cpu", threads=1, adapter_slots=2)


@pytest.fixture(scope="module")
def module_worker(config: WorkerConfig) -> Worker:
    return Worker(config)


@pytest.fixture
def worker(module_worker: Worker) -> Iterator[Worker]:
    """Returns a worker with the runs "run" and "other"."""
    for run_id in ("run", "other"):
        module_worker.create_run(RunSpec(run_id, LORA))
    yield module_worker
    for run_id in ("run", "other"):
        module_worker.drop_run(run_id)
    assert not module_worker._passes._unfinished


def adapter_of(worker: Worker, run_id: str = "run") -> Adapter:
    return worker._models.get(run_id)


def some_request(run_id: str = "run", num_data: int = sum(SIZES), **fields: Any) -> ForwardBackwardRequest:
    random = np.random.default_rng(2)
    return replace(
        ForwardBackwardRequest(run_id, 1, tuple(some_datum(random) for _ in range(num_data)), "ppo"), **fields
    )


def some_datum(random: np.random.Generator) -> Datum:
    tokens = random.integers(0, 512, random.integers(4, 20))
    sampled = {"logprobs": random.normal(-6, 0.3, len(tokens) - 1), "advantages": random.normal(size=len(tokens) - 1)}
    return Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:]} | sampled)


def parts_of(request: ForwardBackwardRequest, work_number: int = 7) -> list[OperationPart]:
    starts = np.cumsum([0, *SIZES]).tolist()
    return [
        OperationPart(
            work_number, replace(request, data=request.data[start : start + size]), start, start + size == sum(SIZES)
        )
        for start, size in zip(starts, SIZES, strict=False)
    ]


def run(worker: Worker, *parts: OperationPart) -> PartAnswer:
    """Runs the parts in one pass and returns the last part's answer."""
    return worker.run_pass(parts)[-1]


def expect_output(answer: PartAnswer) -> ForwardBackwardOutput:
    assert isinstance(answer, ForwardBackwardOutput), answer
    return answer


def expect_failure(answer: object) -> Failure:
    assert isinstance(answer, Failure), answer
    return answer


def with_bad_datum(part: OperationPart, at: int) -> OperationPart:
    data = list(part.request.data)
    data[at] = replace(
        data[at], loss_fn_inputs={**data[at].loss_fn_inputs, "advantages": np.full(len(data[at].tokens), 3e38)}
    )
    return replace(part, request=replace(part.request, data=tuple(data)))


def explodes(*arguments: Any) -> LossOutput:
    raise ArithmeticError("boom")


@pytest.mark.parametrize("forward_only", [False, True])
def test_an_operation_split_over_passes_gives_the_same_results(forward_only: bool, worker: Worker) -> None:
    """Other operations run between its parts and together with them."""
    request, adapter = some_request(forward_only=forward_only), adapter_of(worker)
    expected = expect_output(run(worker, OperationPart(0, request)))
    window = replace(adapter.gradients.window)
    gradient = None if forward_only else adapter.gradients.accumulator.clone()
    worker.clear_gradients("run")
    first, second, last = parts_of(request)
    assert run(worker, first) is None
    expect_output(run(worker, OperationPart(1, some_request("other"))))
    assert run(worker, OperationPart(2, some_request("other")), second) is None
    assert not adapter.gradients.window.num_operations
    found = expect_output(run(worker, last))
    wanted, metrics = repeatable(expected.metrics), repeatable(found.metrics)
    assert metrics == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert metrics != pytest.approx({name: 1.0001 * value for name, value in wanted.items()}, rel=1e-6)
    assert len(found.loss_fn_outputs) == len(request.data)
    for one, other in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=1.5e-6)
    in_parts = adapter.gradients.window
    assert in_parts.num_operations == window.num_operations == (not forward_only)
    assert (in_parts.num_tokens, in_parts.weight_sum) == (window.num_tokens, window.weight_sum)
    if gradient is not None:
        assert float((adapter.gradients.accumulator - gradient).norm() / gradient.norm()) < 1e-6
        assert float((adapter.gradients.accumulator - gradient * (1 + 1e-5)).norm() / gradient.norm()) > 1e-6


@pytest.mark.parametrize("bad_part", [0, 1, 2])
def test_a_failed_part_fails_the_whole_operation(bad_part: int, worker: Worker) -> None:
    adapter = adapter_of(worker)
    expect_output(run(worker, OperationPart(0, some_request())))
    before = adapter.gradients.accumulator.clone()
    parts = parts_of(some_request())
    for part in parts[:bad_part]:
        assert run(worker, part) is None
    failure = expect_failure(run(worker, with_bad_datum(parts[bad_part], 0)))
    assert f"datum {parts[bad_part].first_datum}: the ppo loss" in failure.message
    assert torch.equal(adapter.gradients.accumulator, before)
    assert adapter.gradients.window.num_operations == 1
    assert adapter.gradients.window.refused == failure.message
    for late in parts[bad_part + 1 :]:
        assert "are gone" in expect_failure(run(worker, late)).message


def test_a_retried_part_starts_from_scratch(
    worker: Worker, config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another operation of the pass fails after the part has run, so that the part is retried."""
    monkeypatch.setitem(LOSSES, "broken", replace(LOSSES["ppo"], function=explodes))
    request = some_request()
    expected = expect_output(run(worker, OperationPart(0, request)))
    gradient = pending_gradients(worker, "run")
    worker.clear_gradients("run")
    # Longer sequences run first, so the part's run before the broken one.
    worker = Worker(replace(config, micro_batch_tokens=1))
    for run_id in ("run", "other"):
        worker.create_run(RunSpec(run_id, LORA))
    inputs = {"target_tokens": np.zeros(1, np.int64), "logprobs": np.zeros(1), "advantages": np.ones(1)}
    broken = some_request("other", loss_fn="broken", data=(Datum(np.zeros(1, np.int32), inputs),))
    first, second, last = parts_of(request)
    assert run(worker, first) is None
    answers = worker.run_pass((second, OperationPart(8, broken)))
    assert answers[0] is None
    assert "ArithmeticError: boom" in expect_failure(answers[1]).message
    metrics = repeatable(expect_output(run(worker, last)).metrics)
    assert metrics == pytest.approx(repeatable(expected.metrics), rel=1e-6)
    assert float((pending_gradients(worker, "run") - gradient).norm() / gradient.norm()) < 1e-6


DISCARDING: dict[str, Callable[[Worker, Path], None]] = {
    "dropped": lambda worker, _: (worker.drop_run("run"), worker.create_run(RunSpec("run", LORA)), None)[-1],
    "cleared": lambda worker, _: worker.clear_gradients("run"),
    "loaded": lambda worker, directory: worker.load_run("run", str(directory), optimizer=False),
}


@pytest.mark.parametrize("how", DISCARDING)
def test_dropping_clearing_or_loading_a_run_discards_its_unfinished_operation(
    how: str, worker: Worker, tmp_path: Path
) -> None:
    worker.save_run("run", str(tmp_path), optimizer=False)
    first, second, _ = parts_of(some_request())
    others = parts_of(some_request("other"), work_number=8)
    assert worker.run_pass((first, others[0])) == (None, None)
    DISCARDING[how](worker, tmp_path)
    failure = expect_failure(run(worker, second))
    assert "the results of the 2 data before these are gone" in failure.message
    assert failure.category == "server"
    expect_output([run(worker, part) for part in others[1:]][-1])


def test_an_unfinished_operation_survives_an_offload_of_its_adapter(worker: Worker) -> None:
    """Three runs take turns on two slots."""
    expected = expect_output(run(worker, OperationPart(0, some_request())))
    gradient = pending_gradients(worker, "run")
    worker.clear_gradients("run")
    worker.create_run(RunSpec("third", LORA))
    for part in parts_of(some_request()):
        answer = run(worker, part)
        worker.run_pass((OperationPart(1, some_request("other")), OperationPart(2, some_request("third"))))
    assert repeatable(expect_output(answer).metrics) == pytest.approx(repeatable(expected.metrics), rel=1e-6)
    assert float((pending_gradients(worker, "run") - gradient).norm() / gradient.norm()) < 1e-6
    worker.drop_run("third")


def test_operations_of_one_run_in_a_pass_accumulate_in_order(worker: Worker) -> None:
    """The second operation fails: the third still accumulates, and the step is refused."""
    first, _, third = (replace(some_request(), data=some_request().data[i : i + 2]) for i in (0, 2, 4))
    for request in (first, third):
        expect_output(run(worker, OperationPart(0, request)))
    expected = pending_gradients(worker, "run")
    worker.clear_gradients("run")
    bad = with_bad_datum(OperationPart(1, some_request()), 4)
    answers = worker.run_pass(
        (OperationPart(0, first), bad, OperationPart(2, third), OperationPart(3, replace(first, forward_only=True)))
    )
    assert [type(answer).__name__ for answer in answers] == [
        "ForwardBackwardOutput",
        "Failure",
        "ForwardBackwardOutput",
        "ForwardBackwardOutput",
    ]
    assert torch.equal(pending_gradients(worker, "run"), expected)
    assert pending_window(worker, "run").num_operations == 2
    (step,) = worker.apply_steps((OptimizerStep("run", AdamParams()),))
    assert "datum 4" in expect_failure(step).message


def test_rounds_separate_a_runs_backwards_and_join_its_forwards() -> None:
    def part(run_id: str, forward_only: bool = False) -> OperationPart:
        return OperationPart(0, ForwardBackwardRequest(run_id, 1, (), "ppo", forward_only=forward_only))

    a, b, a_forward, c = part("a"), part("b"), part("a", True), part("c")
    assert list(rounds([a, a, b, a, b], 8)) == [[0, 2], [1, 4], [3]]
    assert list(rounds([a_forward, a, a_forward, b], 8)) == [[0, 2], [1, 3]]
    assert list(rounds([a, b, c, a], 2)) == [[0, 1], [2, 3]]
    assert list(rounds([], 2)) == []

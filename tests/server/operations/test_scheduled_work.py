"""Evaluations that kill their workers are given up, though another run shares its calls with them."""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.protocol.calls import Failure, OptimizerStep, Pass
from trainhouse.workers.protocol.worker_config import WorkerConfig

from ..noting import NotingWorker
from ..real import Run, Server, running_server, server_config, started_dispatch

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

DATUM = {"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}}
FATAL, FATAL_AFTER_STEP = 13, 14
"""First tokens of data of which the forward pass kills the worker, or does so once the run has taken a step."""


class FatalWorker(NotingWorker):
    """Takes long for a pass, so that there is always another run with work for the next one."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._stepped: set[str] = set()

    def apply_steps(self, steps: tuple[OptimizerStep, ...]) -> tuple[dict[str, float] | Failure, ...]:
        self._stepped |= {step.run_id for step in steps}
        return super().apply_steps(steps)

    def run_pass(self, parts: Pass) -> tuple[ForwardBackwardOutput | Failure | None, ...]:
        time.sleep(0.005)
        for part in parts:
            first = {datum.tokens[0] for datum in part.request.data}
            if FATAL in first or (FATAL_AFTER_STEP in first and part.request.model_id in self._stepped):
                os._exit(1)
        answers = super().run_pass(parts)
        return tuple(
            replace(answer, metrics={"loss:sum": 1.0}) if isinstance(answer, ForwardBackwardOutput) else answer
            for answer in answers
        )


def with_fatal_worker(config: DispatchConfig) -> DispatchConfig:
    return replace(config, worker="trainhouse.tests.server.operations.test_scheduled_work:FatalWorker")


@pytest.fixture
async def dispatch(tiny_models: dict[str, Path], tmp_path: Path, anyio_backend: str) -> AsyncIterator[WorkerDispatch]:
    async with started_dispatch(server_config(tiny_models["qwen3"], tmp_path), with_fatal_worker) as dispatch:
        yield dispatch


@pytest.fixture
async def server(dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path) -> AsyncIterator[Server]:
    config = server_config(tiny_models["qwen3"], tmp_path / "state", snapshot_steps=1)
    async with running_server(config, dispatch) as running:
        yield running


async def train_on(run: Run) -> None:
    """Keeps passes of the run waiting, with a snapshot now and then, so that a crash costs it little."""
    waiting: set[asyncio.Task[object]] = set()
    for number in itertools.count(1):
        training = run.do("forward_backward", data=[DATUM], loss_fn="cross_entropy") if number % 8 else run.optim_step()
        waiting.add(asyncio.create_task(training))
        if len(waiting) == 16:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


@pytest.mark.parametrize("is_scheduled", [False, True])
async def test_an_evaluation_that_kills_workers_in_a_later_piece_is_given_up(
    server: Server, dispatch: WorkerDispatch, is_scheduled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainhouse.server.operations.evaluation_data._PIECE_DATUMS", 1)
    run, other = [await server.create_run() for _ in range(2)]
    fatal = DATUM | {"model_input": [FATAL_AFTER_STEP if is_scheduled else FATAL, 6, 7]}
    training = asyncio.create_task(train_on(other))
    evaluation = {
        "loss_fn": "cross_entropy",
        "evaluation": {"name": "own", "every": 1},
        "data": [DATUM] * 100 + [fatal],
    }
    created = asyncio.create_task(run.do("create_evaluation", **evaluation))
    done = created
    if is_scheduled:
        assert "error" not in await created
        await run.do("forward_backward", data=[DATUM], loss_fn="cross_entropy")
        done = asyncio.create_task(run.optim_step())
    await asyncio.wait([done], timeout=40)
    [group] = dispatch.groups
    training.cancel()
    assert done.done() and group.supervisor.num_deaths == (3 if is_scheduled else 4), group.supervisor.num_deaths
    told = done.result()["warnings"][0] if is_scheduled else done.result()["error"]
    assert ("workers died twice in step" if is_scheduled else "died 3 times") in told

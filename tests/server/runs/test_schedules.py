"""Evaluations and scheduled checkpoints in runs with failures, other operations and checkpoints of clients."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError
from trainhouse.server.operations.evaluation_data import EvaluationData
from trainhouse.server.store.tables.checkpoint_table import CheckpointTable
from trainhouse.server.tenants.quotas import Reservation
from trainhouse.workers.dispatch import WorkerDispatch

from ..real import ADAM, MODEL, Run, Server, batch, running_server, server_config

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EVALUATION = {"loss_fn": "cross_entropy", "evaluation": {"name": "own", "every": 1}}
DATUM = {"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}}


@pytest.fixture
async def server(dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path) -> AsyncIterator[Server]:
    config = server_config(tiny_models["qwen3"], tmp_path / "state", tenant_evaluation_bytes=1000)
    async with running_server(config, dispatch) as running:
        yield running


async def names(server: Server, run: Run) -> list[str]:
    listed = await server.clients[run.key].get(f"training_runs/{run.model_id}/checkpoints")
    return [one["checkpoint_id"] for one in listed.json()["checkpoints"]]


async def step(run: Run) -> dict[str, Any]:
    await run.forward_backward(batch())
    return await run.optim_step()


async def test_an_outage_after_the_step_does_not_repeat_it(
    server: Server, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await server.create_run()
    await run.do("schedule_checkpoints", checkpoints={"every": 1})
    await step(run)
    put, left = CheckpointTable.put, [1]

    async def failing(self: CheckpointTable, *arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OperationalError("insert", {}, Exception("database is locked"))
        return await put(self, *arguments)

    monkeypatch.setattr(CheckpointTable, "put", failing)
    metrics = (await step(run))["metrics"]
    assert (metrics["optimizer_step:last"], metrics["checkpoint_step:last"], left) == (2, 2, [0])
    os.kill(dispatch.pids(MODEL)[0], signal.SIGKILL)
    metrics = (await step(run))["metrics"]
    assert (metrics["optimizer_step:last"], metrics["checkpoint_step:last"]) == (3, 3)


async def test_work_that_fails_unexpectedly_leaves_the_step_as_it_was(
    server: Server, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await server.create_run()
    await run.do("create_evaluation", data=[DATUM], **EVALUATION)

    def failing(*arguments: object) -> AsyncIterator[None]:
        raise KeyError("unexpected")

    with monkeypatch.context() as broken:
        broken.setattr(EvaluationData, "read", failing)
        stepped = await step(run)
    assert stepped["warnings"] == ["evaluation own after step 1 failed: the server's log says why"]
    os.kill(dispatch.pids(MODEL)[0], signal.SIGKILL)
    metrics = (await step(run))["metrics"]
    assert metrics["optimizer_step:last"] == 2 and "evaluation/own/loss:mean" in metrics


async def test_a_schedule_sent_right_before_a_step_holds_for_it(server: Server) -> None:
    run = await server.create_run()
    await run.forward_backward(batch())
    first, second, third = (next(run.numbers) for _ in range(3))
    await run.submit("create_evaluation", seq_id=first, data=[DATUM], **EVALUATION)
    await run.submit("schedule_checkpoints", seq_id=second, checkpoints={"every": 1})
    submitted = await run.submit("optim_step", seq_id=third, adam_params=ADAM)
    metrics = (await server.result(submitted["request_id"]))["metrics"]
    assert metrics["checkpoint_step:last"] == 1 and "evaluation/own/loss:mean" in metrics


async def test_only_the_schedules_own_checkpoints_are_deleted_or_replaced(server: Server) -> None:
    run = await server.create_run()
    await run.do("save_weights", path="mine", user_metadata={"schedule": "step", "step": "-5"})
    await run.do("save_weights", path="step-000002")
    await run.do("schedule_checkpoints", checkpoints={"every": 1, "keep_last": 1})
    assert "warnings" not in await step(run)
    kept = "checkpoint step-000002 exists, and was not saved by this schedule: it is kept as it is"
    assert (await step(run))["warnings"] == [kept]
    await step(run)
    assert await names(server, run) == ["weights/mine", "weights/step-000002", "weights/step-000003"]
    refused = await run.do("save_weights", path="x", user_metadata={"trainhouse.step": "1"})
    assert "trainhouse.step, which marks scheduled checkpoints" in refused["error"]


async def test_after_a_rollback_the_newest_are_kept(server: Server) -> None:
    run = await server.create_run()
    saved = await run.do("save_weights", path="zero")
    await run.do("schedule_checkpoints", checkpoints={"every": 1, "keep_last": 2})
    for _ in range(4):
        await step(run)
    await run.do("load_weights", path=saved["path"], optimizer=False)
    await step(run)
    assert await names(server, run) == ["weights/zero", "weights/step-000004", "weights/step-000001"]


async def test_evaluations_are_charged_and_bounded(server: Server) -> None:
    runs = [await server.create_run() for _ in range(3)]
    data = [DATUM] * 8  # of 48 bytes each
    answers = await asyncio.gather(*(run.do("create_evaluation", data=data, **EVALUATION) for run in runs))
    refused = [answer for answer in answers if "error" in answer]
    assert len(refused) == 1 and "the limit is 1000 (the server's --tenant-evaluation-bytes)" in refused[0]["error"]
    limits = (await server.clients[runs[0].key].get("limits")).json()
    assert limits["evaluation_bytes"] == {"limit": 1000, "used": 768}
    for run in runs:
        await run.do("delete_evaluation", name="own")
    limits = (await server.clients[runs[0].key].get("limits")).json()
    assert limits["evaluation_bytes"]["used"] == 0


async def test_evaluated_tokens_are_charged(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run, charged, charge = await server.create_run(), [], Reservation.charge

    def noting(self: Reservation, num_tokens: int) -> None:
        charged.append(num_tokens)
        charge(self, num_tokens)

    await run.do("create_evaluation", data=[DATUM] * 20, **EVALUATION)
    await run.forward_backward(batch())
    monkeypatch.setattr(Reservation, "charge", noting)
    await run.optim_step()
    assert sum(charged) == 20 * 3

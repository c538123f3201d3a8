"""Limits of what a tenant keeps: checkpoints and logged metrics, also of runs that have ended."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import event
from trainhouse.schemas.errors import OperationError, RequestError
from trainhouse.schemas.history import LoggedMetrics
from trainhouse.server.files.storage_config import CheckpointStorageConfig
from trainhouse.server.runs.history import RunHistory
from trainhouse.server.serving.app import _tidy_up
from trainhouse.server.store import DatabaseUnreachable, RunRecord
from trainhouse.server.store.database import tenant_queue
from trainhouse.workers.dispatch import WorkerDispatch

from ..api import ALICE, BOB, LORA, MODEL, Api, running_api, session_record
from ..checkpoints.test_importing import upload
from ..real import batch, running_server, server_config

pytestmark = pytest.mark.anyio


def entries(steps: range, **metrics: float) -> list[LoggedMetrics]:
    return [LoggedMetrics(step=step, metrics=metrics or {"reward": 0.5}) for step in steps]


async def test_a_tenant_has_a_bounded_number_of_checkpoints(tmp_path: Path) -> None:
    async with running_api(tmp_path, storage=CheckpointStorageConfig(tenant_checkpoints=2)) as api:
        run, other, of_bob = await api.run(), await api.run(), await api.run(BOB)
        await api.save(run, "a")
        await api.save(other, "b", "sampler_weights")
        with pytest.raises(OperationError, match=r"you have 2 checkpoints, and the limit is 2: .*--tenant-checkpoints"):
            await api.save(run, "c")
        await api.save(run, "a", overwrite=True)
        await api.save(of_bob, "c")
        copied = {"source_path": f"tinker://{run.run_id}/weights/a"}
        answer = await (await api.client()).post("/api/v1/copy_weights", json=copied)
        assert answer.status_code == 409 and "the limit is 2" in answer.text
        await api.services.checkpoints.delete(await api.services.checkpoints.find(f"tinker://{run.run_id}/weights/a"))
        await api.save(run, "c", ttl_seconds=10)
        with pytest.raises(OperationError, match="the limit is 2"):
            await api.save(run, "d")
        api.clock.now += 20
        await api.save(run, "d")


async def test_checkpoints_of_a_tenant_have_bounded_bytes(tmp_path: Path) -> None:
    async with running_api(tmp_path, storage=CheckpointStorageConfig(tenant_checkpoint_bytes=1500)) as api:
        run = await api.run()
        first = await api.save(run, "a", content=bytes(1000))
        assert first.size_bytes > 1000
        with pytest.raises(OperationError, match=r"would take 2\d+ bytes, and the limit is 1500: .*-checkpoint-bytes"):
            await api.save(run, "b", content=bytes(1000))
        directories = await api.services.store.checkpoints.list_directories()
        assert directories == {first.directory}, "what was refused is gone"
        saves = [api.save(run, f"c{number}", content=bytes(100)) for number in range(8)]
        results = await asyncio.gather(*saves, return_exceptions=True)
        assert any(isinstance(one, OperationError) for one in results)
        assert (await api.services.checkpoints.limits(run.tenant_id))["checkpoint_bytes"].used <= 1500


async def test_limits_show_what_is_kept_and_a_refused_save_fails_alone(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, tenant_checkpoints=1, tenant_metric_bytes=1000)
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        assert "path" in await run.do("save_weights", path="a")
        refused = await run.do("save_weights", path="b")
        assert refused["category"] == "user" and "the limit is 1" in refused["error"]
        scheduled = await run.do("schedule_checkpoints", checkpoints={"every": 1, "keep_last": 1})
        assert scheduled["checkpoints"]["every"] == 1
        logged: dict[str, Any] = {"entries": [{"step": 1, "metrics": {"a": 1.0}}]}
        await server.post(f"training_runs/{run.model_id}/metrics", logged)
        limits = (await server.clients[ALICE].get("limits")).json()
        assert limits["checkpoints"] == {"limit": 1, "used": 1}
        assert limits["checkpoint_bytes"]["limit"] == 4 << 40 and limits["checkpoint_bytes"]["used"] > 1000
        assert limits["metric_bytes"]["limit"] == 1000 and 100 < limits["metric_bytes"]["used"] < 150


async def test_imports_are_refused_and_scheduled_saves_warn_where_there_is_no_room(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, tenant_checkpoints=1)
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        kept = (await run.do("save_weights", path="kept"))["path"]
        schedule = {"every": 1, "keep_last": 1, "prefix": "auto"}
        assert "error" not in await run.do("schedule_checkpoints", checkpoints=schedule)
        refused = await upload(server)
        assert refused.status_code == 400 and "you have 1 checkpoints, and the limit is 1" in refused.json()["detail"]
        assert not [path for path in (tmp_path / "checkpoints").rglob("adapter_model*") if "kept" not in str(path)]
        await run.forward_backward(batch())
        step = await run.optim_step()
        (warning,) = step["warnings"]
        assert step["metrics"]["optimizer_step:last"] == 1 and "checkpoint_step:last" not in step["metrics"]
        assert "checkpoint auto-" in warning and "after step 1 failed: you have 1 checkpoints" in warning
        for verb, fields in (("save_weights_for_sampler", {"path": "b"}), ("save_weights_external", {"path": "c"})):
            failed = await run.do(verb, **fields)
            assert failed["category"] == "user" and "the limit is 1" in failed["error"], verb
        await server.services.checkpoints.delete(await server.services.checkpoints.find(kept))
        await run.forward_backward(batch())
        step = await run.optim_step()
        assert step["metrics"]["checkpoint_step:last"] == 2 and "warnings" not in step
        listed = (await server.clients[ALICE].get("checkpoints")).json()["checkpoints"]
        assert len(listed) == 1 and "auto" in listed[0]["tinker_path"]


async def test_metrics_of_all_runs_of_a_tenant_are_bounded_together(api: Api) -> None:
    runs, of_bob = [await api.run() for _ in range(3)], await api.run(BOB)
    history = RunHistory(api.services.store, 3600.0, 1000)
    await history.log(runs[0], entries(range(4)))
    await history.log(runs[1], entries(range(4)))
    await api.services.sessions.close()  # whether their sessions are open makes no difference
    with pytest.raises(RequestError, match=r"take \d+ bytes, .* limit of 1000: .*--tenant-metric-bytes") as refused:
        await history.log(runs[2], entries(range(4)))
    assert refused.value.status == 413
    await history.log(runs[1], entries(range(4), reward=0.25))  # takes little more room
    await history.log(of_bob, entries(range(4)))
    used = (await history.logged_bytes.limit(runs[0].tenant_id)).used
    again = RunHistory(api.services.store, 3600.0, 1000)
    assert (await again.logged_bytes.limit(runs[0].tenant_id)).used == used, "a new process counts the same"
    history.logged_bytes.subtract(await api.services.store.logged_metrics.delete(1e12))
    assert (await history.logged_bytes.limit(runs[0].tenant_id)).used == 0
    await history.log(runs[2], entries(range(4)))
    history.logged_bytes.forget_sessions([runs[2].session_id])
    assert (await history.logged_bytes.limit(runs[0].tenant_id)).used == 0


@asynccontextmanager
async def held_up(monkeypatch: pytest.MonkeyPatch, table: object, method: str) -> AsyncIterator[None]:
    """Holds calls of a table's method up when they are done, until the block has run for 0.2 s more."""
    proceed, call = asyncio.Event(), getattr(table, method)

    async def held(*arguments: object) -> object:
        try:
            return await call(*arguments)
        finally:
            await proceed.wait()

    with monkeypatch.context() as patch:
        patch.setattr(table, method, held)
        yield
        await asyncio.sleep(0.2)
        proceed.set()


async def used_bytes(history: RunHistory, tenant_id: str) -> int:
    return (await history.logged_bytes.limit(tenant_id)).used


async def test_metrics_logged_while_old_ones_are_deleted_are_counted_exactly(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = await api.run(), api.services.store
    history = RunHistory(store, 0.1)
    await history.log(run, entries(range(4)))
    await asyncio.sleep(0.2)
    async with held_up(monkeypatch, store.logged_metrics, "merge"):
        logging = asyncio.create_task(history.log(run, entries(range(10, 12))))
        await asyncio.sleep(0.05)
        await history.tidy_up([])
    await logging

    used = await used_bytes(history, run.tenant_id)
    assert 0 < used == await used_bytes(RunHistory(store, 0.1), run.tenant_id)


async def test_metrics_deleted_while_a_tenants_are_first_counted_are_counted_exactly(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, store = [await api.run() for _ in range(2)], api.services.store
    tenant_id, before = runs[0].tenant_id, RunHistory(store, 0.5)
    await before.log(runs[0], entries(range(4)))
    await asyncio.sleep(0.6)
    await before.log(runs[1], entries(range(2)))
    history = RunHistory(store, 0.5)
    async with held_up(monkeypatch, store.logged_metrics, "num_bytes"):
        counting = asyncio.create_task(used_bytes(history, tenant_id))
        await asyncio.sleep(0.05)
        tidying = asyncio.create_task(history.tidy_up([]))
    await asyncio.gather(counting, tidying)

    used = await used_bytes(history, tenant_id)
    assert 0 < used == await used_bytes(RunHistory(store, 0.5), tenant_id)


async def test_metrics_first_counted_while_old_ones_are_deleted_are_counted_exactly(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = await api.run(), api.services.store
    await RunHistory(store, 0.5).log(run, entries(range(4)))
    await asyncio.sleep(0.6)
    await RunHistory(store, 0.5).log(run, entries(range(10, 12)))
    history = RunHistory(store, 0.5)
    async with held_up(monkeypatch, store.logged_metrics, "delete"):
        tidying = asyncio.create_task(history.tidy_up([]))
        await asyncio.sleep(0.05)
        counting = asyncio.create_task(used_bytes(history, run.tenant_id))
    await asyncio.gather(counting, tidying)

    used = await used_bytes(history, run.tenant_id)
    assert 0 < used == await used_bytes(RunHistory(store, 0.5), run.tenant_id)


async def test_a_session_deleted_while_its_tenants_metrics_are_first_counted_is_not_counted(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = app.state.services
    tenant = await services.auth.authenticate(ALICE)
    await services.store.sessions.insert(session_record("s1", tenant.id, finished_at=2.0))
    run = RunRecord("s1:train:0", "s1", tenant.id, MODEL, LORA, 1.0, 1.0)
    await services.store.runs.insert(run)
    await RunHistory(services.store, 3600.0).log(run, entries(range(4)))
    async with held_up(monkeypatch, services.store.logged_metrics, "num_bytes"):
        counting = asyncio.create_task(used_bytes(services.history, tenant.id))
        await asyncio.sleep(0.05)
        tidying = asyncio.create_task(_tidy_up(services))
    await asyncio.gather(counting, tidying)

    assert await services.store.sessions.get("s1") is None
    assert await used_bytes(services.history, tenant.id) == 0


async def test_metrics_whose_deletion_is_reported_as_failed_are_counted_exactly(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, table = await api.run(), api.services.store.logged_metrics
    history, delete = RunHistory(api.services.store, 0.1), table.delete
    await history.log(run, entries(range(4)))
    await asyncio.sleep(0.2)

    async def fail_after(logged_before: float) -> None:
        await delete(logged_before)
        raise DatabaseUnreachable("the answer to COMMIT was lost")

    with monkeypatch.context() as patch, pytest.raises(DatabaseUnreachable):
        patch.setattr(table, "delete", fail_after)
        await history.tidy_up([])
    assert await used_bytes(history, run.tenant_id) == 0


async def test_a_tenant_that_has_logged_nothing_takes_no_memory(api: Api) -> None:
    runs, history = [await api.run(f"tml-{number}") for number in range(5)], RunHistory(api.services.store, 0.1)
    for run in runs:
        assert await used_bytes(history, run.tenant_id) == 0
    await history.log(runs[0], entries(range(2)))
    await asyncio.sleep(0.2)
    await history.tidy_up([])
    assert not history.logged_bytes._of_tenants


async def test_a_tenant_logs_one_request_at_a_time_and_few_wait(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_queue, "MAX_WAITING", 4)
    run, of_bob = await api.run(), await api.run(BOB)
    history, at_once = RunHistory(api.services.store, 3600.0), [0, 0]
    merge = api.services.store.logged_metrics.merge

    async def noting(*arguments: Any) -> int | None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0.01)
        try:
            return await merge(*arguments)
        finally:
            at_once[0] -= 1

    monkeypatch.setattr(api.services.store.logged_metrics, "merge", noting)
    calls = [history.log(run, entries(range(step, step + 1))) for step in range(8)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [one for one in results if isinstance(one, RequestError)]
    assert at_once[1] == 1 and len(refused) == 4
    assert refused[0].status == 429 and refused[0].retry_after_seconds
    await history.log(of_bob, entries(range(1)))
    await history.log(run, entries(range(1)))


async def test_searches_leave_the_other_readers_free(api: Api) -> None:
    store, release, num_reading = api.services.store, threading.Event(), []
    tenants = [(await api.run(key)).tenant_id for key in (ALICE, BOB)]

    def slowly(connection: object, cursor: object, statement: str, *_: object) -> None:
        if " LIKE " in statement:
            num_reading.append(1)
            assert release.wait(30)

    event.listen(store._reading, "before_cursor_execute", slowly)
    searches = [
        asyncio.ensure_future(read(tenant))
        for tenant in tenants
        for read in (
            lambda one: store.sessions.page_of_tenant(one, 0, 10, "a", None),
            lambda one: store.runs.list_of_tenant(one, 0, 10, search="a"),
        )
        for _ in range(5)
    ]
    try:
        async with asyncio.timeout(20):
            for _ in range(20):
                assert (await store.sessions.page_of_tenant(tenants[0], 0, 10, "", None))[1].total_count == 1
        assert len(num_reading) == 1
        waiting = [asyncio.ensure_future(store.runs.list_of_tenant(tenants[0], 0, 10, search="a")) for _ in range(40)]
        async with asyncio.timeout(20):
            await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        release.set()
    results = await asyncio.gather(*searches, *waiting, return_exceptions=True)
    refused = [one for one in results if isinstance(one, RequestError)]
    assert len(refused) == 10 + 40 - tenant_queue.MAX_WAITING and refused[0].status == 429

"""Samplers that share the weights of a live full run, and what happens to them when the run is lost."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy.exc import OperationalError
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.workers.dispatch import WorkerDispatch

from ..real import MODEL, Run, Server, batch, running_server, sample, sample_body, server_config, started_dispatch

pytestmark = pytest.mark.anyio


def inflight_config(model: Path, state_dir: Path, **options: object) -> ServerConfig:
    return server_config(model, state_dir, full_sampling="inflight", snapshot_steps=1, **options)


async def create_full_run(server: Server) -> Run:
    session_id = await server.create_session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "training": "full"}
    made = await server.result((await server.post("create_model", body))["request_id"])
    return Run(server, made["model_id"], session_id)


async def logprobs(server: Server, sampler_id: str) -> list[float]:
    found = await sample(server, sample_body(sampler_id, None))
    return list(found.sequences[0].logprobs or ())


async def kill_worker(dispatch: WorkerDispatch) -> None:
    os.kill(dispatch.pids(MODEL)[0], signal.SIGKILL)
    while dispatch.is_up(MODEL):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_sampler_whose_run_is_lost_uses_its_last_save(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config = inflight_config(tiny_models["qwen3"], tmp_path)
    async with started_dispatch(config) as dispatch, running_server(config, dispatch) as server:
        run = await create_full_run(server)
        await run.train(batch(), 1)
        sampler_id = (await run.do("save_weights_for_sampler"))["sampling_session_id"]
        saved = await logprobs(server, sampler_id)
        await run.train(batch(), 3)
        live = await logprobs(server, sampler_id)
        assert not np.allclose(live, saved, atol=1e-2)
        await kill_worker(dispatch)
        np.testing.assert_allclose(await logprobs(server, sampler_id), live, atol=1e-4)
        memory = (await dispatch.memory())[MODEL]
        assert memory["num_full_models_on_device"] == 1, "the run's, and no copy"
        await server.services.runs.snapshot_old_runs(0)
        for path in (tmp_path / "snapshots").rglob("*.safetensors"):
            path.write_bytes(b"damaged")
        await kill_worker(dispatch)
        np.testing.assert_allclose(await logprobs(server, sampler_id), saved, atol=1e-4)
        assert "cannot be rebuilt" in (await run.submit("optim_step", status=410))["detail"]
        np.testing.assert_allclose(await logprobs(server, sampler_id), saved, atol=1e-4)


async def test_a_snapshot_sampler_is_unchanged_after_a_crash(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """The samplers of this server have copies of the weights."""
    config = server_config(tiny_models["qwen3"], tmp_path)
    async with started_dispatch(config) as dispatch, running_server(config, dispatch) as server:
        run = await create_full_run(server)
        await run.train(batch(), 1)
        sampler_id = (await run.do("save_weights_for_sampler"))["sampling_session_id"]
        saved = await logprobs(server, sampler_id)
        await run.train(batch(), 2)
        await kill_worker(dispatch)
        np.testing.assert_allclose(await logprobs(server, sampler_id), saved, atol=1e-4)
        assert (await dispatch.memory())[MODEL]["num_full_models_on_device"] == 1, "no request needs the run"


async def test_many_requests_rebuild_the_run_once(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Operations of the run are among them."""
    config = inflight_config(tiny_models["qwen3"], tmp_path)
    async with started_dispatch(config) as dispatch, running_server(config, dispatch) as server:
        run = await create_full_run(server)
        await run.train(batch(), 2)
        sampler_ids = [(await run.do("save_weights_for_sampler"))["sampling_session_id"] for _ in range(2)]
        live = await logprobs(server, sampler_ids[0])
        await kill_worker(dispatch)
        scoring = asyncio.create_task(run.forward_backward(batch(), forward_only=True))
        found = await asyncio.gather(*(logprobs(server, each) for each in sampler_ids * 2))
        await scoring
        for each in found:
            np.testing.assert_allclose(each, live, atol=1e-4)
        assert (await dispatch.memory())[MODEL]["num_full_models_on_device"] == 1


AWAY = OperationalError("select", {}, Exception("the database is away"))


@pytest.mark.parametrize("error", [AWAY, OSError("disk")])
async def test_a_sample_waits_for_the_database_and_no_failed_load_is_kept(
    tiny_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    monkeypatch.setattr("trainhouse.server.sampling.sampler_weights.OUTAGE_RETRY_SECONDS", 0.05)
    config = server_config(tiny_models["qwen3"], tmp_path, long_poll_seconds=0.1)
    async with started_dispatch(config) as dispatch, running_server(config, dispatch) as server:
        run = await server.create_run()
        path = (await run.do("save_weights_for_sampler", path="a"))["path"]
        session = {"session_id": run.session_id, "sampling_session_seq_id": 7, "model_path": path}
        sampler_id = (await server.post("create_sampling_session", session))["sampling_session_id"]
        is_away, resolve = True, server.services.checkpoints.resolve

        async def find(*arguments: Any) -> Any:
            if is_away:
                raise error
            return await resolve(*arguments)

        monkeypatch.setattr(server.services.checkpoints, "resolve", find)
        posted = await server.post("asample", sample_body(sampler_id, 0))
        if error is AWAY:
            while "database is away" not in (pending := (await server.retrieve(posted["request_id"])).json()).get(
                "queue_state_reason", ""
            ):
                assert pending["queue_state"] == "active"
            assert caplog.text.count("the database is away") == 1, "not once for each attempt"
            is_away = False
            assert "sequences" in await server.result(posted["request_id"])
        else:  # nothing to wait for
            assert "internal error" in (await server.result(posted["request_id"]))["error"]
            is_away = False
        assert (await sample(server, sample_body(sampler_id, 5))).sequences

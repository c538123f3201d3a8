"""Two whole servers on one database and directory, in this process: a former holder does no harm."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from trainhouse.server.cli.commands import main
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.files.state_lock import LiveState, StartError
from trainhouse.server.replication import leased_server
from trainhouse.server.replication.leases import Lease, LeaseExpired
from trainhouse.server.replication.standby import LeaseGuard
from trainhouse.server.serving.server_process import bound_socket
from trainhouse.server.store import LeaseLost, LeaseRecord, Store, StoreConfig, open_store
from trainhouse.workers.dispatch import WorkerDispatch

from ..real import ADAM, MODEL, Run, Server, batch, running_server, sample_body, server_config
from .test_standby import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

LEASE_SECONDS = 3.0


@dataclass
class Holding:
    server: Server
    live: LiveState
    keeping: asyncio.Task[None]

    def stop_renewing(self) -> None:
        """Lets the lease expire, as a paused process does."""
        self.keeping.cancel()


@asynccontextmanager
async def holding(config: ServerConfig, dispatch: WorkerDispatch, name: str) -> AsyncIterator[Holding]:
    """Takes the lease and serves, as the process does."""
    store = open_store(config.store)
    lease = Lease(store, [MODEL], f"http://{name}", LEASE_SECONDS)
    await lease.prepare(config.store.state_dir)
    tenure = await lease.acquire()
    directory = tenure.take_live_state(config.store.state_dir)
    live = LiveState(directory, tenure.check, tenure.record, lambda: tenure.renewal_error)
    keeping = asyncio.create_task(tenure.keep_renewing())
    try:
        with suppress(LeaseLost, LeaseExpired):
            async with running_server(config, dispatch, live, guarded=lambda app: LeaseGuard(app, tenure)) as server:
                yield Holding(server, live, keeping)
    finally:
        keeping.cancel()
        store.close()


async def test_a_former_holder_acknowledges_publishes_and_deletes_nothing(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, postgres_url: str
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, database_url=postgres_url, snapshot_steps=2)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(holding(config, dispatch, "a"))
        former = first.server
        run = await former.create_run()
        losses = await run.train(batch(), num_steps=3)
        await run.do("save_weights", path="kept")
        late = Run(former, run.model_id, run.session_id)
        late.numbers = itertools.count(100)

        first.stop_renewing()
        second = await stack.enter_async_context(holding(config, dispatch, "b"))
        latter = second.server
        assert (first.live.directory.name, second.live.directory.name) == ("live-1", "live-2")
        for _ in range(2):
            answer = await late.submit("save_weights", path="late", status=503)
            assert "no longer holds the lease: send this again" in answer["detail"]
        with pytest.raises(LeaseLost):
            await former.services.store.sessions.set_project(run.session_id, "late")
        with pytest.raises(LeaseLost):
            async with former.services.checkpoints.writing(await record(latter, run), "weights", "kept", True) as files:
                (files / "late").touch()

        again = Run(latter, run.model_id, run.session_id)
        again.numbers = itertools.count(next(run.numbers))
        losses += await again.train(batch(), num_steps=2)
        assert await again.do("save_weights", path="new")
        await former.services.runs.close()
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 5
    assert losses == pytest.approx(await undisturbed(dispatch, tiny_models, tmp_path / "calm"), rel=1e-4)
    assert [name for name in os.listdir(tmp_path) if name.startswith("live")] == ["live-2"]
    assert saved_in(tmp_path) == ["kept", "new"]


def saved_in(state_dir: Path) -> list[str]:
    assert not list(state_dir.glob("checkpoints/*/weights/*/late"))
    return sorted(path.name.partition(".")[0] for path in state_dir.glob("checkpoints/*/weights/*"))


async def record(server: Server, run: Run):
    found = await server.services.store.runs.get(run.model_id)
    assert found is not None
    return found


async def undisturbed(dispatch: WorkerDispatch, tiny_models: dict[str, Path], state_dir: Path) -> list[float]:
    async with running_server(server_config(tiny_models["qwen3"], state_dir), dispatch) as server:
        return await (await server.create_run()).train(batch(), num_steps=5)


async def test_the_next_holder_gives_the_results_of_the_former_one(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, postgres_url: str
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, database_url=postgres_url)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(holding(config, dispatch, "a"))
        former = first.server
        run = await former.create_run()
        submitted = (await run.send(run.encode(batch(), next(run.numbers)))).json()["request_id"]
        answered = await former.result(submitted)
        first.stop_renewing()
        latter = (await stack.enter_async_context(holding(config, dispatch, "b"))).server
        assert (await former.retrieve(submitted)).status_code == 503
        assert await latter.result(submitted) == answered
        assert "error" not in await Run(latter, run.model_id, run.session_id).do("optim_step", seq_id=2)


async def test_used_numbers_belong_to_their_requests_after_a_takeover(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, postgres_url: str
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, database_url=postgres_url, result_memory_bytes=1)
    inputs = {"target_tokens": [6, 7], "weights": [1.0, 0.5]}
    losses = {"data": [{"model_input": [5, 6], "loss_fn_inputs": inputs}], "loss_fn": "cross_entropy"}
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(holding(config, dispatch, "a"))
        former = first.server
        run = await former.create_run()
        numbers = {"session_id": run.session_id, "model_seq_id": 0, "sampling_session_seq_id": 0}
        session = {name: numbers[name] for name in ("session_id", "sampling_session_seq_id")} | {"base_model": MODEL}
        sampler_id = (await former.post("create_sampling_session", session))["sampling_session_id"]
        of_run = {"model_id": run.model_id}
        sent = [
            ("forward_backward", of_run | {"seq_id": 1} | losses),
            ("optim_step", of_run | {"seq_id": 2, "adam_params": ADAM}),
            ("optim_step", of_run | {"seq_id": 4}),  # behind a gap
            ("asample", sample_body(sampler_id)),
        ]
        answers = [await former.post(verb, body) for verb, body in sent]
        ended = [answer["request_id"] for answer in (answers[0], answers[1], answers[3])]
        results = [await former.result(request_id) for request_id in ended]
        first.stop_renewing()
        latter = (await stack.enter_async_context(holding(config, dispatch, "b"))).server
        for (verb, body), answer in zip(sent, answers, strict=True):
            assert await latter.post(verb, body) == answer
            kind = verb.removeprefix("a")
            others = [(verb, body | {"num_samples": 2}, f"another {kind} with different content")]
            if verb != "asample":
                number = {name: body[name] for name in ("model_id", "seq_id")}
                others = [("save_weights", number | {"path": "a"}, "a save_weights")]
                changed = number | losses | {"loss_weight": 2.0} if "data" in body else body | {"gradient_scale": 2.0}
                others.append((verb, changed, f"another {verb} with different content"))
            for other, content, words in others:
                refused = (await latter.post(other, content, status=400))["detail"]
                assert f" {kind}, this is {words}: is another process" in refused
        assert [await latter.result(request_id) for request_id in ended] == results
        model = {name: numbers[name] for name in ("session_id", "model_seq_id")} | {"base_model": MODEL}
        refused = (await latter.post("create_model", model | {"lora_config": {"rank": 8}}, status=400))["detail"]
        assert "was a create_model, this is another create_model with different content" in refused
        filled = await latter.post("save_weights", of_run | {"seq_id": 3, "path": "a"})
        assert "path" in await latter.result(filled["request_id"]), "a number that was refused to none stays free"


async def test_a_server_that_cannot_take_over_releases_the_lease_and_retries(
    tmp_path: Path, postgres_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leased_server, "_REST_SECONDS", 2.0)
    state, elsewhere, no_model = (tmp_path / name for name in ("state", "elsewhere", "no-model"))
    for directory in (state, no_model):  # without a model, its own takeover ends soon
        directory.mkdir()
    config = server_config(no_model, state, database_url=postgres_url)
    stores = [open_store(config.store) for _ in range(2)]
    mine, other = (Lease(store, [MODEL], f"http://{name}", 60.0) for store, name in zip(stores, "ab", strict=True))
    await mine.prepare(state)
    state.rename(elsewhere)
    said: list[str] = []
    with bound_socket("127.0.0.1", 0) as listener:
        server = leased_server.LeasedServer(config, mine, lambda: "working", said.append)
        running = asyncio.create_task(server.run(listener))
        await wait_until(lambda: "cannot take over now ([Errno 2] No such file" in caplog.text)
        await asyncio.wait_for(other.acquire(), 30)  # well before a lease of 60 s runs out
        await wait_until(lambda: said)
        assert said == ["standing by: http://b holds the lease"] and not running.done()
        elsewhere.rename(state)
        await other.release()
        with pytest.raises(StartError, match="no-model"):
            await asyncio.wait_for(running, 60)
    assert (state / "live-3").exists()
    for store in stores:
        store.close()


def test_a_server_without_the_shared_directory_does_not_start(
    capsys: pytest.CaptureFixture[str], tiny_models: dict[str, Path], tmp_path: Path, postgres_url: str
) -> None:
    store = open_store(StoreConfig(tmp_path, postgres_url))
    try:
        asyncio.run(hold_once(Lease(store, [MODEL], "http://a", 60.0), tmp_path))
        (tmp_path / "unmounted").mkdir()
        place = [f"--state-dir={tmp_path / 'unmounted'}", f"--database-url={postgres_url}", "--port=0"]
        assert main(["serve", f"--base-model={MODEL}={tiny_models['qwen3']}", *place]) == 1
        assert "unmounted has no live state, but the database has a record of one" in capsys.readouterr().err
        assert {(lease.epoch, lease.expires_at) for lease in asyncio.run(leases_in(store))} == {(1, 0.0)}
    finally:
        store.close()


async def hold_once(lease: Lease, state_dir: Path) -> None:
    await lease.prepare(state_dir)
    (await lease.acquire()).take_live_state(state_dir)
    await lease.release()


async def leases_in(store: Store) -> tuple[LeaseRecord, ...]:
    return await store.leases.list_all()

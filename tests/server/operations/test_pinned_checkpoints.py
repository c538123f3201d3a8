"""Checkpoints that runs have loaded stay pinned while they may have to be loaded again, even if their owner deletes
them."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.files.manifest import write_manifest
from trainhouse.server.operations.pinned_checkpoints import PinnedCheckpoints
from trainhouse.workers.dispatch import WorkerDispatch

from ..real import ALICE, BOB, Run, Server, batch, running_server, server_config

pytestmark = pytest.mark.anyio

RUN_ID = "session:train:0"


@pytest.fixture
def config(tiny_models: dict[str, Path], tmp_path: Path) -> ServerConfig:
    return server_config(tiny_models["qwen3"], tmp_path / "state")


async def save_over(source: Run, path: str) -> None:
    await source.train(batch(seed=1), 2)
    assert (await source.do("save_weights", path=path.rpartition("/")[2], overwrite=True))["path"] == path


async def delete(source: Run, path: str) -> None:
    checkpoint_id = path.removeprefix(f"tinker://{source.model_id}/")
    client = source.server.clients[source.key]
    assert (await client.delete(f"training_runs/{source.model_id}/checkpoints/{checkpoint_id}")).is_success


async def load_into_a_live_run(server: Server, path: str) -> Run:
    run = await server.create_run()
    await run.train(batch(), 1)
    assert "error" not in await run.do("load_weights", path=path, optimizer=True)
    return run


async def create_from_checkpoint(server: Server, path: str) -> Run:
    session_id = await server.create_session()
    body = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": True}
    return Run(
        server, (await server.result((await server.post("load_weights", body))["request_id"]))["model_id"], session_id
    )


@pytest.mark.parametrize("load", [load_into_a_live_run, create_from_checkpoint])
@pytest.mark.parametrize("lose", [save_over, delete])
async def test_recovery_loads_the_pinned_checkpoint(
    load: Callable[[Server, str], Awaitable[Run]],
    lose: Callable[[Run, str], Awaitable[None]],
    config: ServerConfig,
    dispatch: WorkerDispatch,
) -> None:
    """The snapshots are removed before."""
    async with running_server(config, dispatch) as server:
        source = await server.create_run()
        await source.train(batch(), 2)
        path = (await source.do("save_weights", path="last"))["path"]
        run = await load(server, path)
        await run.train(batch(), 1)
        expected = (await run.forward_backward(batch(), forward_only=True)).metrics["loss:sum"]
        await lose(source, path)
        other = (await source.forward_backward(batch(), forward_only=True)).metrics["loss:sum"]
    shutil.rmtree(config.store.state_dir / "snapshots")
    async with running_server(config, dispatch) as server:
        run.server = server
        found = (await run.forward_backward(batch(), forward_only=True)).metrics["loss:sum"]
    assert found == pytest.approx(expected, rel=1e-5) != other


async def test_a_pin_is_removed_by_a_snapshot_or_at_the_end_of_the_session(
    config: ServerConfig, dispatch: WorkerDispatch
) -> None:
    async with running_server(config, dispatch) as server:
        source = await server.create_run()
        await source.train(batch(), 1)
        run = await load_into_a_live_run(server, (await source.do("save_weights", path="a"))["path"])
        kept = config.store.state_dir / "loaded" / run.model_id.replace(":", "_")
        assert [one.name for one in kept.iterdir()] == ["3"]
        await server.services.runs.snapshot_old_runs(held_seconds=0)
        await until(lambda: not any(kept.iterdir()))
        run = await load_into_a_live_run(server, f"tinker://{source.model_id}/weights/a")
        assert len(list(kept.parent.glob("*/3"))) == 1
        await server.post(f"sessions/{run.session_id}/finish", {"reason": {"type": "success"}}, status=204)
        await until(lambda: not any(kept.parent.glob("*/3")))


async def test_a_queued_load_by_access_token_is_done_after_a_restart(
    config: ServerConfig, dispatch: WorkerDispatch
) -> None:
    async with running_server(config, dispatch) as server:
        source = await server.create_run()
        path = (await source.do("save_weights", path="shared"))["path"]
        run = await server.create_run(BOB)
        loads = [
            await run.submit("load_weights", seq_id=2, path=path, optimizer=True, weights_access_token=ALICE),
            await run.submit("load_weights", seq_id=3, path=path, optimizer=True),
        ]
    async with running_server(config, dispatch) as server:
        run.server = server
        await run.forward_backward(batch())
        allowed, refused = [await server.result(one["request_id"], BOB) for one in loads]
        assert allowed["path"] == path
        assert "not yours to read" in refused["error"]
    files = [file.read_bytes() for file in config.store.state_dir.rglob("*") if file.is_file()]
    assert not any(ALICE.encode() in content for content in files)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    write_manifest(directory, {})
    return directory


@pytest.mark.parametrize("sync", [False, True])
async def test_a_pinned_copy_outlives_the_checkpoint(checkpoint: Path, tmp_path: Path, sync: bool) -> None:
    loaded = PinnedCheckpoints(tmp_path / "loaded", sync)
    assert await loaded.find(RUN_ID, 3) is None
    kept = await loaded.pin(RUN_ID, 3, checkpoint)
    shutil.rmtree(checkpoint)
    assert await loaded.find(RUN_ID, 3) == kept
    assert (kept / "adapter_model.safetensors").read_bytes() == b"weights"
    await loaded.unpin_up_to(RUN_ID, 2, ())
    await loaded.retain(RUN_ID, {2, 3}, ())
    assert kept.exists()
    await loaded.unpin_up_to(RUN_ID, 3, ())
    assert await loaded.find(RUN_ID, 3) is None


async def test_weights_and_target_of_one_operation_are_pinned_separately(checkpoint: Path, tmp_path: Path) -> None:
    loaded = PinnedCheckpoints(tmp_path / "loaded", sync=False)
    weights = await loaded.pin(RUN_ID, 3, checkpoint)
    assert await loaded.find(RUN_ID, 3, "target") is None
    target = await loaded.pin(RUN_ID, 3, checkpoint, "target")
    assert [await loaded.find(RUN_ID, 3, part) for part in ("weights", "target")] == [weights, target]
    await loaded.retain(RUN_ID, {3}, ())
    await loaded.unpin_up_to(RUN_ID, 2, ())
    assert target.exists() and weights.exists()
    await loaded.unpin_up_to(RUN_ID, 3, {3})
    assert target.exists() and not weights.exists(), "a snapshot names the target"
    await loaded.retain(RUN_ID, (), {3})
    assert target.exists()
    await loaded.unpin_up_to(RUN_ID, 3, ())
    assert not target.exists()


async def test_a_damaged_pinned_copy_is_reported_and_replaced(checkpoint: Path, tmp_path: Path) -> None:
    loaded = PinnedCheckpoints(tmp_path / "loaded", sync=True)
    kept = await loaded.pin(RUN_ID, 3, checkpoint) / "adapter_model.safetensors"
    kept.unlink()
    with pytest.raises(ValueError, match="is incomplete or damaged"):
        await loaded.find(RUN_ID, 3)
    assert await loaded.pin(RUN_ID, 3, checkpoint) == kept.parent
    assert await loaded.find(RUN_ID, 3) == kept.parent
    assert kept.read_bytes() == b"weights"


async def test_pinning_a_checkpoint_deleted_meanwhile_is_a_user_error(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "adapter_model.safetensors").unlink()
    with pytest.raises(OperationError, match="deleted meanwhile") as raised:
        await PinnedCheckpoints(tmp_path / "loaded", sync=False).pin(RUN_ID, 3, checkpoint)
    assert raised.value.category == "user"


async def test_a_failed_pin_reports_the_reason_and_logs_the_path(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "loaded").write_text("no directory")
    with pytest.raises(OperationError, match=r"cannot keep a copy of it \(Not a directory\)") as raised:
        await PinnedCheckpoints(tmp_path / "loaded", sync=False).pin(RUN_ID, 3, checkpoint)
    assert raised.value.category == "server" and str(tmp_path) not in raised.value.message
    assert str(tmp_path / "loaded") in caplog.text


async def test_a_damaged_copy_is_replaced_before_but_not_after_the_load(
    config: ServerConfig, dispatch: WorkerDispatch
) -> None:
    """A run that has loaded a checkpoint must not continue from another one."""
    async with running_server(config, dispatch) as server:
        source = await server.create_run()
        path = (await source.do("save_weights", path="a"))["path"]
        run = await server.create_run()
        kept = config.store.state_dir / "loaded" / run.model_id.replace(":", "_") / "1"
        kept.mkdir(parents=True)
        assert (await run.do("load_weights", path=path, optimizer=True))["path"] == path
        (kept / "adapter_model.safetensors").unlink()
    shutil.rmtree(config.store.state_dir / "snapshots")
    async with running_server(config, dispatch) as server:
        run.server = server
        error = (await run.optim_step())["error"]
        assert "the loaded checkpoint is damaged" in error and str(config.store.state_dir) not in error


async def test_a_pin_without_a_journal_record_is_dropped(checkpoint: Path, tmp_path: Path) -> None:
    """The next operation with that seq_id may be a different one."""
    loaded = PinnedCheckpoints(tmp_path / "loaded", sync=False)
    await loaded.pin(RUN_ID, 3, checkpoint)
    await loaded.retain(RUN_ID, {2}, ())
    assert await loaded.find(RUN_ID, 3) is None


async def test_a_failed_pin_is_a_server_error(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "loaded").write_bytes(b"not a directory")
    with pytest.raises(OperationError, match="free space") as failed:
        await PinnedCheckpoints(tmp_path / "loaded", sync=False).pin(RUN_ID, 3, checkpoint)
    assert failed.value.category == "server"


async def test_sweep_removes_unfinished_pins_and_those_of_ended_runs(checkpoint: Path, tmp_path: Path) -> None:
    loaded = PinnedCheckpoints(tmp_path / "loaded", sync=False)
    kept = await loaded.pin(RUN_ID, 3, checkpoint)
    await loaded.pin("session:train:1", 3, checkpoint)
    (kept.parent / ".staging-1").mkdir()
    loaded.sweep({RUN_ID})
    assert [path.name for path in (tmp_path / "loaded").rglob("*") if path.is_dir()] == ["session_train_0", "3"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

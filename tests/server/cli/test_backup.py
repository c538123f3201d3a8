"""`trainhouse backup` of running and stopped servers: the copy verifies, and a server can continue on it."""

import asyncio
import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_forward_backward_output
from trainhouse.server.cli.backup import Backup
from trainhouse.server.cli.commands import main
from trainhouse.server.cli.verify import verify as verify_files
from trainhouse.server.files.segment_log import SegmentLog
from trainhouse.server.files.storage_config import CheckpointStorageConfig
from trainhouse.server.store import DATABASE_NAME, ResultRecord, SqliteStore
from trainhouse.workers.dispatch import WorkerDispatch

from ...drawn import all_drawn
from ..api import running_api
from ..real import ADAM, PROTOBUF, Run, batch, running_server, sample, sample_body, server_config
from .test_verify import Verified, create_all_state, save_and_end, stopped_state, verify

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

__all__ = ["stopped_state", "verify"]


async def backup(target: Path, state_dir: Path, *flags: str) -> int:
    return await asyncio.to_thread(main, ["backup", str(target), f"--state-dir={state_dir}", *flags])


async def next_losses(run: Run, num_steps: int) -> list[float]:
    """Trains on and returns the losses. The first step applies any gradients that the run was left with."""
    await run.do("optim_step", seq_id=0, adam_params=ADAM)
    losses = []
    for _ in range(num_steps):
        submitted = (await run.send(run.encode(batch(), 0))).json()
        response = await run.server.retrieve(submitted["request_id"], run.key, PROTOBUF)
        losses.append(deserialize_forward_backward_output(response.content).metrics["loss:sum"])
        assert "error" not in await run.do("optim_step", seq_id=0, adam_params=ADAM)
    return losses


async def test_a_server_continues_on_the_backup_of_a_running_one(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, verify: Callable[..., Verified]
) -> None:
    state, copy = tmp_path / "state", tmp_path / "copy"
    async with running_server(server_config(tiny_models["qwen3"], state, snapshot_steps=2), dispatch) as server:
        run, sampler_id = await create_all_state(server)
        drawn = await sample(server, sample_body(sampler_id, 1))
        training = asyncio.create_task(run.train(batch(), 30))
        await asyncio.sleep(0.1)
        assert await backup(copy, state) == 0
        assert not training.done()
        losses = await training
    assert (await asyncio.to_thread(verify, copy)).lines[-1].endswith(": all is whole")
    files = [next(place.glob("checkpoints/*/*/*/adapter_model.safetensors")) for place in (state, copy)]
    assert files[0].samefile(files[1]), "shared where the file system can"
    shutil.rmtree(state)

    async with running_server(server_config(tiny_models["qwen3"], copy, snapshot_steps=2), dispatch) as server:
        again = await sample(server, sample_body(sampler_id, 2))
        assert all_drawn(again) == all_drawn(drawn)
        copied = Run(server, run.model_id, run.session_id)
        continued = await next_losses(copied, 3)
        first = int(np.argmin(np.abs(np.array(losses) - continued[0])))
        np.testing.assert_allclose(continued, losses[first : first + 3], rtol=1e-4)
        assert len(set(np.round(losses, 4))) == len(losses), "equal losses would match any step"
        loaded = await copied.do("load_weights", seq_id=0, path=f"tinker://{run.model_id}/weights/a")
        assert loaded["type"] == "load_weights"


async def test_a_client_ahead_of_the_backup_learns_the_newest_checkpoint(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    state, copy = tmp_path / "state", tmp_path / "copy"
    async with running_server(server_config(tiny_models["qwen3"], state), dispatch) as server:
        run = await server.create_run()
        quiet = await server.create_run()
        path = (await run.do("save_weights", path="a"))["path"]
        assert await backup(copy, state) == 0
        await run.train(batch(), 1)
    async with running_server(server_config(tiny_models["qwen3"], copy, seq_gap_seconds=0.2), dispatch) as server:
        ahead, quiet = (replace(one, server=server) for one in (run, quiet))
        ahead.numbers = itertools.count(4)
        error = (await ahead.do("optim_step", adam_params=ADAM))["error"]
        assert "the client is ahead of that" in error and error.endswith(f"newest first: {path}")
        await ahead.submit("optim_step", status=410, adam_params=ADAM)
        await quiet.train(batch(), 1)
    assert not (state / "copied.json").exists()


async def test_a_backup_collects_checkpoints_from_every_place_in_the_database(
    tmp_path: Path, verify: Callable[..., Verified], capsys: pytest.CaptureFixture[str]
) -> None:
    state, copy = tmp_path / "state", tmp_path / "copy"
    records = []
    for number, place in enumerate((None, str(tmp_path / "elsewhere"), f"file://{tmp_path}/afar")):
        async with running_api(state, storage=CheckpointStorageConfig(place)) as api:
            records.append(await save_and_end(api, f"{number}".encode()))
    assert await backup(copy, state) == 0
    printed = capsys.readouterr().out
    assert f"1 checkpoints are at URLs, such as file://{tmp_path}/afar" in printed and "trainhouse verify" in printed
    for mine in (state, tmp_path / "elsewhere"):
        shutil.rmtree(mine)
    async with running_api(copy) as api:
        for number, record in enumerate(records):
            (mine,) = await api.services.store.checkpoints.list_of_runs([record.run_id], 0.0)
            async with api.services.checkpoints.reading(mine) as directory:
                assert (directory / "adapter_model.safetensors").read_bytes() == f"{number}".encode()
        secret = (copy / "url_secret").stat()
    assert secret.st_mode & 0o777 == 0o600 and copy.stat().st_mode & 0o777 == 0o700
    assert (await asyncio.to_thread(verify, copy)).status == 0


async def test_backup_and_verify_find_the_live_state_of_replicas(stopped_state: Path, tmp_path: Path) -> None:
    copy, live = tmp_path / "copy", stopped_state / "live-3"
    live.mkdir()
    for name in ("journal", "results", "recordings", "snapshots", "loaded", "ephemeral"):
        (stopped_state / name).rename(live / name)

    async def found(state: Path) -> list[str]:
        lines: list[str] = []
        store = SqliteStore(state / DATABASE_NAME)
        await verify_files(store, state, CheckpointStorageConfig(), False, False, lines.append)
        store.close()
        return lines

    counts = await found(stopped_state)
    shown: list[tuple[int, int]] = []
    Backup(stopped_state, copy, True, lambda num_done, num_all: shown.append((num_done, num_all))).run(print)
    num_done, num_all = shown[-1]
    assert shown == sorted(shown) and 0.9 * num_all < num_done <= num_all and len(shown) > 3
    assert await found(copy) == counts == [counts[-1]]
    (weights,) = live.glob("ephemeral/*")
    shutil.rmtree(weights)
    assert str(weights) in (await found(stopped_state))[0]


async def test_results_written_after_their_file_was_copied_are_left_out(tmp_path: Path) -> None:
    state, copy = tmp_path / "state", tmp_path / "copy"
    async with running_api(state) as api:
        tenant, segments = await api.tenant(), SegmentLog(state / "results", 1 << 20)
        taking = Backup(state, copy, True)
        taking._prepare()
        for request_id in ("before", "after"):
            place = str(await segments.append({"request_id": request_id}))
            await api.services.store.results.put([ResultRecord(request_id, tenant.id, place, 0, "json", 1.0)])
            if request_id == "before":
                taking._take_segments("results")
        taking._take_database()
        await segments.close()
    async with running_api(copy) as api:
        found = [await api.services.store.results.get(request_id) for request_id in ("before", "after")]
    assert [result is None for result in found] == [False, True]


async def test_backing_up_a_copied_state_directory_ignores_the_original(
    tmp_path: Path, verify: Callable[..., Verified]
) -> None:
    state, copied, taken = (tmp_path / name for name in ("state", "copied", "taken"))
    async with running_api(state) as api:
        lost, kept = [await save_and_end(api, b"weights") for _ in range(2)]
    shutil.copytree(state, copied)
    shutil.rmtree(copied / Path(lost.directory).relative_to(state))
    assert await backup(taken, copied) == 0
    assert (taken / Path(kept.directory).relative_to(state)).is_dir()
    assert not (taken / Path(lost.directory).relative_to(state)).exists()
    for one in (copied, taken):
        lines = (await asyncio.to_thread(verify, one)).lines
        assert lost.tinker_path in lines[-2] and lines[-1].endswith(": 1 problem")


async def test_a_damaged_checkpoint_is_copied_and_reported_by_verify(
    tmp_path: Path, verify: Callable[..., Verified]
) -> None:
    state, copy = tmp_path / "state", tmp_path / "copy"
    async with running_api(state) as api:
        record = await save_and_end(api, b"right")
        lost = await save_and_end(api, b"lost")
    (Path(record.directory) / "adapter_model.safetensors").write_bytes(b"wrong")
    shutil.rmtree(lost.directory)
    assert await backup(copy, state) == 0
    lines = (await asyncio.to_thread(verify, copy)).lines
    for damaged in (record, lost):
        assert any(line.startswith(f"{damaged.tinker_path}: is damaged: ") for line in lines)
    assert lines[-1].endswith(": 2 problems")


async def test_with_postgresql_only_files_are_copied_and_pg_dump_is_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, copy, flag = tmp_path / "state", tmp_path / "copy", "--database-url=postgresql+psycopg://nobody@nowhere/none"
    (state / "live-1").mkdir(parents=True)
    async with running_api(state) as api:
        await save_and_end(api, b"first")
        assert await backup(copy, state, flag) == 0
        assert "pg_dump it now, then run this again" in capsys.readouterr().out
        await save_and_end(api, b"second")
        assert await backup(copy, state, flag) == 0
    assert not (copy / "trainhouse.db").exists()
    assert {file.read_bytes() for file in copy.glob("checkpoints/*/*/*/adapter_model.safetensors")} == {
        b"first",
        b"second",
    }


async def test_unusable_sources_and_targets_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await backup(tmp_path / "copy", tmp_path) == 1
    assert "is not the state directory" in capsys.readouterr().err
    async with running_api(tmp_path / "state"):
        pass
    assert await backup(tmp_path, tmp_path / "state") == 1
    assert "is not empty" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "state")
    for inside in (tmp_path / "state" / "copy", tmp_path / "state", tmp_path / "link" / "copy"):
        assert await backup(inside, tmp_path / "state") == 1
        assert f"{inside} is inside the state directory" in capsys.readouterr().err
    assert not (tmp_path / "state" / "copy").exists()
    (tmp_path / "state" / "trainhouse.db").unlink()
    assert await backup(tmp_path / "copy", tmp_path / "state") == 1
    assert "has no trainhouse.db: name the server's database with --database-url" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()

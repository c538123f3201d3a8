"""`trainhouse verify` on the state of a real server: damage is reported, and repaired where that is safe."""

import asyncio
import os
import re
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from trainhouse.schemas.adapters.tensor_file import CHECKSUMS, FileTensor, checksums_as_text, write_tensors
from trainhouse.server.cli.commands import main
from trainhouse.server.files.state_lock import StartError, locked_state_directory
from trainhouse.server.files.storage_config import CheckpointStorageConfig
from trainhouse.server.serving.server_process import _has_keys
from trainhouse.server.store import DATABASE_NAME, CheckpointRecord
from trainhouse.workers.dispatch import WorkerDispatch

from ..api import Api, running_api
from ..checkpoints.test_mirror import all_copied, mirrored, wait_for_copies
from ..real import Run, Server, batch, running_server, sample, sample_body, server_config

pytestmark = pytest.mark.anyio


async def create_all_state(server: Server) -> tuple[Run, str]:
    """Creates every kind of state. Returns the run, and the id of an ephemeral sampler of its weights."""
    run = await server.create_run()
    await run.train(batch(), 5)
    path = (await run.do("save_weights", path="a"))["path"]
    await run.do("load_weights", path=path, optimizer=True)
    saved = await run.do("save_weights_for_sampler", sampling_session_seq_id=0)
    sampler_id = saved["sampling_session_id"]
    await sample(server, sample_body(sampler_id, record_stability_info=True))
    await asyncio.sleep(0.3)  # the last snapshot is written by then
    return run, sampler_id


@pytest.fixture(scope="module")
async def stopped_state(
    dispatch: WorkerDispatch,
    tiny_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    anyio_backend: str,
) -> AsyncIterator[Path]:
    """Yields the state directory of a server that was stopped during a session."""
    state = tmp_path_factory.mktemp("left") / "state"
    async with running_server(server_config(tiny_models["qwen3"], state, snapshot_steps=2), dispatch) as server:
        await create_all_state(server)
    yield state


@dataclass
class Verified:
    status: int
    lines: list[str]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Callable[..., Verified]:
    def run(state: Path, *flags: str) -> Verified:
        status = main(["verify", f"--state-dir={state}", *flags])
        captured = capsys.readouterr()
        return Verified(status, (captured.out + captured.err).splitlines())

    return run


def only(state: Path, pattern: str) -> Path:
    (path,) = state.glob(pattern)
    return path


def test_the_state_of_a_stopped_server_is_whole(stopped_state: Path, verify: Callable[..., Verified]) -> None:
    found = verify(stopped_state)
    assert (found.status, len(found.lines)) == (0, 1), found.lines
    assert found.lines[0].startswith("1 checkpoint, 0 copies, ") and found.lines[0].endswith(": all is whole")
    assert "0 snapshots" not in found.lines[0] and "0 results" not in found.lines[0]


def test_undamaged_features_are_whole(stopped_state: Path, tmp_path: Path, verify: Callable[..., Verified]) -> None:
    state = tmp_path / "state"
    shutil.copytree(stopped_state, state)
    content = np.ones((3, 4), np.float32)
    store_features(state, content, content)
    assert verify(state).status == 0


def cut_checkpoint(state: Path) -> Path:
    os.truncate(only(state, "checkpoints/*/*/*/adapter_model.safetensors"), 100)
    return only(state, "checkpoints/*/*/*")


def lose_manifest(state: Path) -> Path:
    only(state, "checkpoints/*/*/*/manifest.json").unlink()
    return only(state, "checkpoints/*/*/*")


def empty_manifest(state: Path) -> Path:
    only(state, "checkpoints/*/*/*/manifest.json").write_bytes(b"")
    return only(state, "checkpoints/*/*/*")


def lose_checkpoint(state: Path) -> Path:
    directory = only(state, "checkpoints/*/*/*")
    shutil.rmtree(directory)
    return directory


def change_snapshot(state: Path) -> Path:
    snapshot = sorted(state.glob("snapshots/*/*"))[-1]
    file = next(snapshot.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    return snapshot


def change_loaded(state: Path) -> Path:
    loaded = only(state, "loaded/*/*")
    (loaded / "adapter_config.json").write_bytes(b"{}")
    return loaded


def tear_journal(state: Path) -> Path:
    segment = max(state.glob("journal/*.segment"))
    with segment.open("ab") as file:
        file.write(b"half a record")
    return segment


def damage_journal(state: Path) -> Path:
    return damage_first_segment(state, "journal")


def damage_results(state: Path) -> Path:
    return damage_first_segment(state, "results")


def damage_first_segment(state: Path, name: str) -> Path:
    """Overwrites a byte in the middle of the first segment."""
    segment = min(state.glob(f"{name}/*.segment"))
    with segment.open("r+b") as file:
        file.seek(60)
        file.write(b"\0")
    return segment


def lose_results(state: Path) -> Path:
    segment = max(state.glob("results/*.segment"))
    segment.unlink()
    return segment


def leave_staging(state: Path) -> Path:
    staging = only(state, "checkpoints/*/*") / ".staging-0"
    staging.mkdir()
    return staging


def leave_unlisted(state: Path) -> Path:
    return Path(shutil.copytree(only(state, "checkpoints/*/*/*"), only(state, "checkpoints/*/*") / "b.00000000"))


def lose_rows(state: Path) -> None:
    with closing(sqlite3.connect(state / DATABASE_NAME)) as database:
        database.execute("DELETE FROM checkpoints")
        database.commit()


def lose_row(state: Path) -> Path:
    lose_rows(state)
    return only(state, "checkpoints/*/*/*")


def leave_torn(state: Path) -> Path:
    torn = leave_unlisted(state)
    (torn / "adapter_model.safetensors").unlink()
    return torn


def leave_snapshot(state: Path) -> Path:
    return Path(shutil.copytree(only(state, "snapshots/*"), state / "snapshots" / "over_train_0"))


def leave_loaded(state: Path) -> Path:
    return Path(shutil.copytree(only(state, "loaded/*"), state / "loaded" / "over_train_0"))


def leave_ephemeral(state: Path) -> Path:
    return Path(shutil.copytree(only(state, "ephemeral/*"), state / "ephemeral" / "over"))


def lose_ephemeral(state: Path) -> Path:
    directory = only(state, "ephemeral/*")
    shutil.rmtree(directory)
    return directory


def change_ephemeral(state: Path) -> Path:
    file = only(state, "ephemeral/*/*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    return file.parent


def store_features(state: Path, content: np.ndarray, of: np.ndarray) -> Path:
    """Stores features with the checksum of other ones, as a worker does."""
    path = state / "features" / "tenant" / "a.safetensors"
    path.parent.mkdir(parents=True)
    checksums = checksums_as_text({"captured": crc32(of.data)})
    write_tensors(path, {"captured": FileTensor.of(content)}, {CHECKSUMS: checksums})
    return path


def damage_features(state: Path) -> Path:
    return store_features(state, np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32))


def _problems(number: int) -> str:
    return "1 problem" if number == 1 else f"{number} problems"


@pytest.mark.parametrize(
    ("damage", "meaning", "repaired"),
    [
        (
            cut_checkpoint,
            r"is damaged: adapter_model.safetensors does not match its manifest \(100 bytes, not [0-9]+\); "
            "it has no copy at a mirror: restore .* from a backup, or delete it: tinker checkpoint delete tinker://.*/weights/a",
            None,
        ),
        (lose_manifest, "is damaged: manifest.json is missing; it has no copy at a mirror", None),
        (
            empty_manifest,
            "is damaged: manifest.json is damaged: it is not the JSON of a manifest; it has no copy",
            None,
        ),
        (lose_checkpoint, "is damaged: it is missing; it has no copy at a mirror", None),
        (change_snapshot, r"a snapshot of .* is damaged: .* does not match .* \(its hash differs\)", "removed"),
        (change_loaded, "a checkpoint that .* has loaded is damaged: adapter_config.json .*; do nothing if", None),
        (tear_journal, "is torn: its last 13 bytes", "the last 13 bytes cut off"),
        (damage_journal, "is damaged at byte .*: an operation is lost.*; it cannot be repaired: if its run must", None),
        (damage_results, "is damaged at byte .*: a result is lost; it cannot be repaired: only a client", None),
        (lose_results, "results are missing from it", "[1-9][0-9]* rows dropped"),
        (leave_staging, "left over: a checkpoint that was never published", "removed"),
        (leave_unlisted, "no row of this database refers to it: .*; delete it by hand, .*servers remove it 30", None),
        (lose_row, "is whole, but the database has no row of tinker://.*/weights/a;", ".*/weights/a has its row again"),
        (leave_torn, "left over: a checkpoint that was never published", "removed"),
        (leave_snapshot, "left over: files of a run that has ended", "removed"),
        (leave_loaded, "left over: files of a run that has ended", "removed"),
        (leave_ephemeral, "left over: the weights of a sampler", "removed"),
        (damage_features, "captured features are damaged: the draft's target runs instead", None),
        (change_ephemeral, r"the weights of a sampler are damaged: .* \(its hash differs\).*; they cannot be", None),
        (lose_ephemeral, "the weights of a sampler are lost: its requests are answered 410; they cannot be", None),
    ],
)
def test_each_damage_is_reported_in_one_line_and_repaired_if_safe(
    stopped_state: Path,
    tmp_path: Path,
    verify: Callable[..., Verified],
    damage: Callable[[Path], Path],
    meaning: str,
    repaired: str | None,
) -> None:
    state = tmp_path / "state"
    shutil.copytree(stopped_state, state)
    damaged = damage(state)
    found = verify(state)
    assert found.status == 1 and found.lines[-1].endswith(f": {_problems(len(found.lines) - 1)}")
    line = found.lines[0]
    assert re.match(f"({re.escape(str(damaged))}|tinker://.*/weights/a): .*{meaning}", line), found.lines
    assert line.count(str(damaged)) == 1 and not re.search("Errno|Expecting|char 0|Exception", line)
    assert ("; run with --repair, which " in line) == (repaired is not None)
    mended = verify(state, "--repair")
    if repaired is None:
        assert mended.status == 1 and "; repaired: " not in mended.lines[0]
        assert mended.lines[0] == line, "the remedy is still there"
        return
    assert mended.status == 0 and re.search(f"; repaired: {repaired}$", mended.lines[0]), mended.lines
    assert verify(state).status == 0


def damage_table(database: Path, name: str) -> None:
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        ((page_bytes,),) = opened.execute("PRAGMA page_size")
        ((page,),) = opened.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,))
    with database.open("r+b") as file:
        file.seek(page_bytes * (page - 1))
        file.write(b"\xff" * 64)


def damage_head(database: Path, _: str) -> None:
    with database.open("r+b") as file:
        file.write(bytes(64))


@pytest.mark.parametrize(
    ("damage", "table"),
    [(damage_table, "checkpoints"), (damage_table, "leases"), (damage_table, "results"), (damage_head, "")],
)
def test_a_damaged_database_is_reported_and_no_server_starts_on_it(
    stopped_state: Path,
    tmp_path: Path,
    tiny_models: dict[str, Path],
    verify: Callable[..., Verified],
    damage: Callable[[Path, str], None],
    table: str,
) -> None:
    state = tmp_path / "state"
    shutil.copytree(stopped_state, state)
    config = server_config(tiny_models["qwen3"], state)
    assert asyncio.run(_has_keys(config)) is False, "the control"
    damage(state / DATABASE_NAME, table)
    for flags in ((), ("--repair",)):
        found = verify(state, *flags)
        assert found.status == 1 and "database" in found.lines[0] and "restore it from a backup" in found.lines[0]
        assert not re.search("Traceback|sqlalche|sqlite3", "\n".join(found.lines))
    with pytest.raises(StartError, match=r"is damaged .*restore it from a backup; or move it away"):
        asyncio.run(_has_keys(config))


def test_a_missing_state_directory_is_refused(tmp_path: Path, verify: Callable[..., Verified]) -> None:
    found = verify(tmp_path / "none")
    assert found.status == 1 and "give the server's directory with --state-dir" in found.lines[0]
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
async def test_verify_reads_but_does_not_repair_under_a_running_server(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, verify: Callable[..., Verified]
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, snapshot_steps=1)
    with locked_state_directory(tmp_path):
        async with running_server(config, dispatch) as server:
            run, _ = await create_all_state(server)
            training = asyncio.create_task(run.train(batch(), 300))
            found = await asyncio.to_thread(verify, tmp_path)
            assert not training.done()
            refused = await asyncio.to_thread(verify, tmp_path, "--repair")
            await training
    assert found.status == 0, found.lines
    assert refused.status == 1 and "is in use by the server with process id" in refused.lines[0]


async def save_and_end(api: Api, content: bytes) -> CheckpointRecord:
    """Saves a checkpoint in a session that has ended, so that its run needs no other files."""
    run = await api.run()
    await api.services.store.sessions.end(run.session_id, 1.0, "success", None)
    return await api.save(run, content=content)


async def test_a_damaged_checkpoint_is_restored_from_its_mirror(
    tmp_path: Path, verify: Callable[..., Verified]
) -> None:
    state, mirror = tmp_path / "state", f"file://{tmp_path}/mirror"
    async with running_api(state, storage=mirrored(mirror)) as api:
        record = await save_and_end(api, b"right")
        (copy,) = await wait_for_copies(api, record, all_copied)
    (Path(record.directory) / "adapter_model.safetensors").write_bytes(b"wrong")
    line = (await asyncio.to_thread(verify, state)).lines[0]
    assert line.endswith("(its hash differs); run with --repair, which restores it from its mirror")
    state = state.rename(tmp_path / "moved")
    assert "; repaired: restored" in (await asyncio.to_thread(verify, state, "--repair")).lines[0]
    moved = state / Path(record.directory).relative_to(tmp_path / "state")
    assert (moved / "adapter_model.safetensors").read_bytes() == b"right"

    shutil.rmtree(copy.url.removeprefix("file://"))
    found = await asyncio.to_thread(verify, state, "--repair")
    assert f"{copy.url}: the copy of {record.tinker_path} is damaged: manifest.json is missing; " in found.lines[0]
    async with running_api(state, storage=mirrored(mirror)) as api:
        await wait_for_copies(api, replace(record, directory=str(moved)), all_copied)
    assert (await asyncio.to_thread(verify, state)).status == 0


async def test_failed_copies_are_counted_as_failed(tmp_path: Path, verify: Callable[..., Verified]) -> None:
    state, file = tmp_path / "state", tmp_path / "file"
    file.touch()
    async with running_api(state, storage=mirrored(f"file://{file}/mirror")) as api:
        record = await save_and_end(api, b"weights")
        await wait_for_copies(api, record, lambda copies: copies[0].state == "failed")
    found = await asyncio.to_thread(verify, state)
    assert found.status == 0 and found.lines[0].startswith("1 checkpoint, 1 copy (1 failed), ")
    assert found.lines[0].endswith(": all that exists is whole")


async def test_checkpoints_at_a_url_are_verified(tmp_path: Path, verify: Callable[..., Verified]) -> None:
    state, place = tmp_path / "state", f"file://{tmp_path}/place"
    async with running_api(state, storage=CheckpointStorageConfig(place)) as api:
        record = await save_and_end(api, b"weights")
    here = Path(record.directory.removeprefix("file://"))
    flag = f"--checkpoints={place}"
    assert (await asyncio.to_thread(verify, state, flag)).status == 0
    (here.parent / "torn.0").mkdir()
    (here.parent / "torn.0" / "file").write_bytes(b"half")
    shutil.copytree(here, here.parent / "unknown.0")
    found = await asyncio.to_thread(verify, state, flag, "--repair")
    assert "no row of this database refers to it" in next(line for line in found.lines if "unknown.0" in line)
    assert "; repaired: removed" in next(line for line in found.lines if "torn.0" in line)
    assert (here.parent / "unknown.0").exists(), "complete checkpoints are not deleted"
    shutil.rmtree(here.parent / "unknown.0")
    lose_rows(state)
    assert (await asyncio.to_thread(verify, state, flag)).status == 1
    found = await asyncio.to_thread(verify, state, flag, "--repair")
    assert (
        f"{record.directory}: is whole, but the database has no row of {record.tinker_path}; repaired: "
        in found.lines[0]
    )
    assert f"{record.tinker_path} has its row again" in found.lines[0]
    assert (await asyncio.to_thread(verify, state, flag)).status == 0
    os.truncate(here / "adapter_model.safetensors", 1)
    found = await asyncio.to_thread(verify, state, flag)
    line = next(line for line in found.lines if line.startswith(f"{record.tinker_path}: is damaged: "))
    assert "(1 bytes, not " in line and line.count(record.directory) == 1

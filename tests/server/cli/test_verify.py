"""verify over the state that a real server has left: clean as it is; each damage told, and repaired where it can be."""

import asyncio
import os
import re
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from trainhouse.server.cli.commands import main
from trainhouse.server.files.config import PlaceConfig
from trainhouse.server.replication.state_lock import StartError, locked
from trainhouse.server.serving.process import _has_keys
from trainhouse.server.store import DATABASE_NAME, CheckpointRecord
from trainhouse.workers.dispatch import WorkerDispatch

from ..api import Api, running_api
from ..checkpoints.test_mirror import all_copied, mirrored, until_copies
from ..real import Run, Server, batch, running_server, sample, sample_body, server_config

pytestmark = pytest.mark.anyio


async def work(server: Server) -> tuple[Run, str]:
    """Of every kind that leaves something behind; the run, and an ephemeral sampler of its weights."""
    run = await server.create_run()
    await run.train(batch(), 5)
    path = (await run.do("save_weights", path="a"))["path"]
    await run.do("load_weights", path=path, optimizer=True)
    saved = await run.do("save_weights_for_sampler", sampling_session_seq_id=0)
    sampler_id = saved["sampling_session_id"]
    await sample(server, sample_body(sampler_id, record_stability_info=True))
    await asyncio.sleep(0.3)  # until the last snapshot is there
    return run, sampler_id


@pytest.fixture(scope="module")
async def left(
    dispatch: WorkerDispatch,
    tiny_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    anyio_backend: str,
) -> AsyncIterator[Path]:
    """The state directory of a server that was stopped in the midst of its session."""
    state = tmp_path_factory.mktemp("left") / "state"
    async with running_server(server_config(tiny_models["qwen3"], state, snapshot_steps=2), dispatch) as server:
        await work(server)
    yield state


@dataclass
class Verified:
    status: int
    lines: list[str]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Callable[..., Verified]:
    """`trainhouse verify`."""

    def run(state: Path, *flags: str) -> Verified:
        status = main(["verify", f"--state-dir={state}", *flags])
        captured = capsys.readouterr()
        return Verified(status, (captured.out + captured.err).splitlines())

    return run


def only(state: Path, pattern: str) -> Path:
    (path,) = state.glob(pattern)
    return path


def test_what_a_server_leaves_is_whole(left: Path, verify: Callable[..., Verified]) -> None:
    found = verify(left)
    assert (found.status, len(found.lines)) == (0, 1), found.lines
    assert found.lines[0].startswith("1 checkpoint, 0 copies, ") and found.lines[0].endswith(": all is whole")
    assert "0 snapshots" not in found.lines[0] and "0 results" not in found.lines[0]


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


def hurt_journal(state: Path) -> Path:
    return hurt_first(state, "journal")


def hurt_results(state: Path) -> Path:
    return hurt_first(state, "results")


def hurt_first(state: Path, name: str) -> Path:
    """In the midst of it."""
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


def _problems(number: int) -> str:
    return "1 problem" if number == 1 else f"{number} problems"


@pytest.mark.parametrize(
    ("damage", "meaning", "repaired"),
    [
        (
            cut_checkpoint,
            r"is damaged: adapter_model.safetensors is not as its manifest says \(100 bytes, not [0-9]+\); "
            "it has no copy at a mirror: put back .* from a backup, or delete it: tinker checkpoint delete tinker://.*/weights/a",
            None,
        ),
        (lose_manifest, "is damaged: manifest.json is missing; it has no copy at a mirror", None),
        (empty_manifest, "is damaged: manifest.json is damaged: it is no JSON of a manifest; it has no copy", None),
        (lose_checkpoint, "is damaged: it is missing; it has no copy at a mirror", None),
        (change_snapshot, r"a snapshot of .* is damaged: .*safetensors is .* \(its hash differs\)", "removed"),
        (change_loaded, "what .* has loaded is damaged: adapter_config.json is .*; nothing, while", None),
        (tear_journal, "is torn: its last 13 bytes", "the last 13 bytes cut off"),
        (hurt_journal, "is damaged at byte .*: an operation is lost.*; nothing mends it: if its run must be", None),
        (hurt_results, "is damaged at byte .*: a result is lost; nothing mends it: it only mattered for", None),
        (lose_results, "results are not in it", "[1-9][0-9]* rows dropped"),
        (leave_staging, "left over: a checkpoint that was never published", "removed"),
        (leave_unlisted, "no row of this database knows it: .*; delete it by hand, .*servers remove it 30 days", None),
        (lose_row, "is whole, but the database has no row of tinker://.*/weights/a;", ".*/weights/a has its row again"),
        (leave_torn, "left over: a checkpoint that was never published", "removed"),
        (leave_snapshot, "left over: of a run that is over", "removed"),
        (leave_loaded, "left over: of a run that is over", "removed"),
        (leave_ephemeral, "left over: the weights of a sampler", "removed"),
        (lose_ephemeral, "the weights of a sampler are lost: it answers 410; nothing brings them back: save", None),
    ],
)
def test_each_damage_is_told_in_a_line_and_repaired_where_that_is_safe(
    left: Path,
    tmp_path: Path,
    verify: Callable[..., Verified],
    damage: Callable[[Path], Path],
    meaning: str,
    repaired: str | None,
) -> None:
    state = tmp_path / "state"
    shutil.copytree(left, state)
    hurt = damage(state)
    found = verify(state)
    assert found.status == 1 and found.lines[-1].endswith(f": {_problems(len(found.lines) - 1)}")
    line = found.lines[0]
    assert re.match(f"({re.escape(str(hurt))}|tinker://.*/weights/a): .*{meaning}", line), found.lines
    assert line.count(str(hurt)) == 1 and not re.search("Errno|Expecting|char 0|Exception", line)
    assert ("; run with --repair, which " in line) == (repaired is not None)
    mended = verify(state, "--repair")
    if repaired is None:
        assert mended.status == 1 and "; repaired: " not in mended.lines[0]
        assert mended.lines[0] == line, "and what to do about it"
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
def test_a_damaged_database_is_told_and_no_server_starts_on_it(
    left: Path,
    tmp_path: Path,
    tiny_models: dict[str, Path],
    verify: Callable[..., Verified],
    damage: Callable[[Path, str], None],
    table: str,
) -> None:
    state = tmp_path / "state"
    shutil.copytree(left, state)
    config = server_config(tiny_models["qwen3"], state)
    assert asyncio.run(_has_keys(config)) is False, "the control"
    damage(state / DATABASE_NAME, table)
    for flags in ((), ("--repair",)):
        found = verify(state, *flags)
        assert found.status == 1 and "database" in found.lines[0] and "put it back from a backup" in found.lines[0]
        assert not re.search("Traceback|sqlalche|sqlite3", "\n".join(found.lines))
    with pytest.raises(StartError, match=r"is damaged .*put it back from a backup; or move it away"):
        asyncio.run(_has_keys(config))


def test_there_must_be_a_state_directory(tmp_path: Path, verify: Callable[..., Verified]) -> None:
    found = verify(tmp_path / "none")
    assert found.status == 1 and "name the server's directory with --state-dir" in found.lines[0]
    assert not (tmp_path / "none").exists()


async def test_beside_a_running_server_it_only_looks(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, verify: Callable[..., Verified]
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, snapshot_steps=1)
    with locked(tmp_path):
        async with running_server(config, dispatch) as server:
            run, _ = await work(server)
            training = asyncio.create_task(run.train(batch(), 30))
            found = await asyncio.to_thread(verify, tmp_path)
            assert not training.done()
            refused = await asyncio.to_thread(verify, tmp_path, "--repair")
            await training
    assert found.status == 0, found.lines
    assert refused.status == 1 and "is in use by the server with process id" in refused.lines[0]


async def save_and_end(api: Api, content: bytes) -> CheckpointRecord:
    """In a session that has ended: nothing of its run needs to be there."""
    run = await api.run()
    await api.services.store.end_session(run.session_id, 1.0, "success", None)
    return await api.save(run, content=content)


async def test_a_damaged_checkpoint_comes_back_from_its_mirror(tmp_path: Path, verify: Callable[..., Verified]) -> None:
    state, mirror = tmp_path / "state", f"file://{tmp_path}/mirror"
    async with running_api(state, places=mirrored(mirror)) as api:
        record = await save_and_end(api, b"right")
        (copy,) = await until_copies(api, record, all_copied)
    (Path(record.directory) / "adapter_model.safetensors").write_bytes(b"wrong")
    told = (await asyncio.to_thread(verify, state)).lines[0]
    assert told.endswith("(its hash differs); run with --repair, which brings it back from its mirror")
    state = state.rename(tmp_path / "moved")
    assert "; repaired: brought back" in (await asyncio.to_thread(verify, state, "--repair")).lines[0]
    moved = state / Path(record.directory).relative_to(tmp_path / "state")
    assert (moved / "adapter_model.safetensors").read_bytes() == b"right"

    shutil.rmtree(copy.url.removeprefix("file://"))
    found = await asyncio.to_thread(verify, state, "--repair")
    assert f"{copy.url}: the copy of {record.tinker_path} is damaged: manifest.json is missing; " in found.lines[0]
    async with running_api(state, places=mirrored(mirror)) as api:
        await until_copies(api, replace(record, directory=str(moved)), all_copied)
    assert (await asyncio.to_thread(verify, state)).status == 0


async def test_a_copy_that_could_not_be_made_is_counted_as_that(
    tmp_path: Path, verify: Callable[..., Verified]
) -> None:
    state, file = tmp_path / "state", tmp_path / "file"
    file.touch()
    async with running_api(state, places=mirrored(f"file://{file}/mirror")) as api:
        record = await save_and_end(api, b"weights")
        await until_copies(api, record, lambda copies: copies[0].state == "failed")
    found = await asyncio.to_thread(verify, state)
    assert found.status == 0 and found.lines[0].startswith("1 checkpoint, 1 copy (1 failed), ")
    assert found.lines[0].endswith(": what is there is whole")


async def test_checkpoints_at_a_url_are_looked_at(tmp_path: Path, verify: Callable[..., Verified]) -> None:
    state, place = tmp_path / "state", f"file://{tmp_path}/place"
    async with running_api(state, places=PlaceConfig(place)) as api:
        record = await save_and_end(api, b"weights")
    here = Path(record.directory.removeprefix("file://"))
    flag = f"--checkpoints={place}"
    assert (await asyncio.to_thread(verify, state, flag)).status == 0
    (here.parent / "torn.0").mkdir()
    (here.parent / "torn.0" / "file").write_bytes(b"half")
    shutil.copytree(here, here.parent / "unknown.0")
    found = await asyncio.to_thread(verify, state, flag, "--repair")
    assert "no row of this database knows it" in next(line for line in found.lines if "unknown.0" in line)
    assert "; repaired: removed" in next(line for line in found.lines if "torn.0" in line)
    assert (here.parent / "unknown.0").exists(), "a whole one is nobody's to delete"
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

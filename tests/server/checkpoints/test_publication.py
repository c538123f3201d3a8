"""A process killed before any step of a publication: listed checkpoints are complete, and the rest is swept."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from trainhouse.server.checkpoints.checkpoints import Checkpoints
from trainhouse.server.checkpoints.leftovers import has_complete_files
from trainhouse.server.files.manifest import check_directory
from trainhouse.server.files.object_store import key_of
from trainhouse.server.files.storage_config import CheckpointStorageConfig
from trainhouse.server.store import DATABASE_NAME, SqliteStore
from trainhouse.server.tenants.auth import Auth

from ..api import running_api
from ..killed import FIRST, SECOND, mirror_of
from ..s3 import BUCKET, names_at, s3_server

pytestmark = pytest.mark.anyio

SECONDS = 120
SOON_SECONDS = 30


@asynccontextmanager
async def started(state: Path, config: CheckpointStorageConfig) -> AsyncIterator[tuple[Checkpoints, SqliteStore]]:
    store = SqliteStore(state / DATABASE_NAME)
    checkpoints = Checkpoints(store, Auth(store, True), state, config=config)
    await checkpoints.start()
    yield checkpoints, store
    await checkpoints.close()
    store.close()


async def kill(action: str, tmp_path: Path, place: str | None = None) -> list[Path]:
    """Kills the action before every step and returns the state directories that are left."""
    async with running_api(tmp_path / "base") as api:
        await api.run()
    arguments = [sys.executable, "-m", "trainhouse.tests.server.killed", action, str(tmp_path / "base")]
    arguments += [place] if place else []
    done = await asyncio.to_thread(
        subprocess.run, arguments, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    return [tmp_path / f"{number:03d}" for number in range(int(done.stdout) + 1)]


async def kill_at_every_step(action: str, tmp_path: Path, place: str | None = None) -> list[list[bytes]]:
    """Returns the weights of the listed checkpoints after each kill, and checks that no incomplete files remain."""
    states = await kill(action, tmp_path, place)
    return [await contents_after_a_restart(state, place and f"{place}/{state.name}") for state in states]


async def contents_after_a_restart(state: Path, place: str | None) -> list[bytes]:
    async with started(state, CheckpointStorageConfig(place)) as (checkpoints, store):
        found = await store.checkpoints.list_of_runs(await store.runs.list_ids(), 0.0)
        directories = {record.directory for record in found}
        if place is None:
            existing = list((state / "checkpoints").glob("*/*/*"))
            assert directories <= {str(path) for path in existing} and all(map(has_complete_files, existing))
            assert not list((state / "checkpoints").glob("*/.*"))
        else:
            await wait_until_swept(place, {directory.removeprefix(f"{place}/") for directory in directories})
        contents = []
        for record in found:
            async with checkpoints.reading(record) as directory:
                check_directory(directory)
                (content,) = {file.read_bytes() for file in directory.glob("*.safetensors")}
                contents.append(content)
        return contents


async def wait_until_swept(place: str, published: set[str]) -> None:
    """Waits until every directory at the URL has its manifest."""
    async with asyncio.timeout(SOON_SECONDS):
        while True:
            try:
                names = names_at(place)
            except OSError:  # moto answers 500 if a file is deleted while it lists them
                await asyncio.sleep(0.01)
                continue
            whole = {name.removesuffix("/manifest.json") for name in names if name.endswith("/manifest.json")}
            if {name.rpartition("/")[0] for name in names} == whole:
                break
            await asyncio.sleep(0.01)
    assert published <= whole


def assert_nothing_then_first_then_second(outcomes: list[list[bytes]]) -> None:
    order = [[[], [FIRST], [SECOND]].index(outcome) for outcome in outcomes]
    assert order == sorted(order) and set(order) == {0, 1, 2} and len(order) > 20


@pytest.mark.slow
async def test_a_save_killed_at_every_step(tmp_path: Path) -> None:
    outcomes = await kill_at_every_step("save", tmp_path)
    saved = outcomes.index([SECOND])
    assert saved > 10 and outcomes == [[]] * saved + [[SECOND]] * (len(outcomes) - saved)


@pytest.mark.full
async def test_an_overwriting_save_killed_at_every_step(tmp_path: Path) -> None:
    assert_nothing_then_first_then_second(await kill_at_every_step("save_twice", tmp_path))


@pytest.mark.full
async def test_an_overwriting_save_at_a_url_killed_at_every_step(tmp_path: Path) -> None:
    with s3_server():
        outcomes = await kill_at_every_step("save_twice", tmp_path, f"s3://{BUCKET}/killed")
    assert_nothing_then_first_then_second(outcomes)


@pytest.mark.full
async def test_a_copy_killed_at_every_step(tmp_path: Path) -> None:
    outcomes = await kill_at_every_step("save_and_copy", tmp_path)
    assert all(content == SECOND for outcome in outcomes for content in outcome)
    num_listed = [len(outcome) for outcome in outcomes]
    assert num_listed == sorted(num_listed) and set(num_listed) == {0, 1, 2}


@pytest.mark.full
async def test_mirror_copies_match_the_listed_checkpoints_after_every_kill(tmp_path: Path) -> None:
    states = await kill("save_mirror_and_delete", tmp_path)
    num_listed = []
    for state in states:
        mirror = mirror_of(state)
        async with started(state, CheckpointStorageConfig(mirrors=(mirror,))) as (_, store):
            directories = await store.checkpoints.list_directories()
            expected = {key_of(directory) for directory in directories}
            num_listed.append(len(expected))
            async with asyncio.timeout(SOON_SECONDS):
                while await store.copies.list_unfinished() or keys_at(mirror) != expected:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    assert set(num_listed) == {0, 1} and num_listed[-1] == 0


def keys_at(place: str) -> set[str]:
    return {name.rpartition("/")[0] for name in names_at(place)}


@pytest.mark.full
async def test_a_deletion_killed_at_every_step(tmp_path: Path) -> None:
    outcomes = await kill_at_every_step("save_and_delete", tmp_path)
    num_saved, num_deleted = outcomes.index([SECOND]), len(outcomes) - outcomes[::-1].index([SECOND])
    assert all(outcome == [] for outcome in outcomes[:num_saved] + outcomes[num_deleted:])
    assert all(outcome == [SECOND] for outcome in outcomes[num_saved:num_deleted])
    assert 0 < num_saved < num_deleted < len(outcomes)

"""Copies of checkpoints at mirrors: made in the background, tried again, told of, read from, and deleted with them."""

import asyncio
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.server.files.config import PlaceConfig
from trainhouse.server.store import CheckpointCopyRecord, CheckpointRecord, RunRecord

from ..api import ALICE, BOB, Api, running_api
from ..files.test_object_store import FILES, until_names_at, weights_of
from ..s3 import BUCKET, S3, names_at
from .test_checkpoints import fetch, url, urls_of

pytestmark = pytest.mark.anyio

SOON_SECONDS = 30.0


@pytest.fixture
def mirror(s3: S3, request: pytest.FixtureRequest) -> Iterator[str]:
    """Of this test alone."""
    s3.requests.clear()
    yield f"s3://{BUCKET}/mirror-{abs(hash(request.node.name))}"
    s3.fails = lambda request: False


def mirrored(*mirrors: str, **options) -> PlaceConfig:
    return PlaceConfig(mirrors=mirrors, pauses_seconds=(), mirror_pause_seconds=0.05, **options)


@pytest.fixture
async def mirroring(mirror: str, tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "state", places=mirrored(mirror)) as api:
        yield api


async def until_copies(
    api: Api, record: CheckpointRecord, hold: Callable[[tuple[CheckpointCopyRecord, ...]], bool]
) -> tuple[CheckpointCopyRecord, ...]:
    async with asyncio.timeout(SOON_SECONDS):
        while not hold(copies := await api.services.store.list_copies([record.directory])):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return copies


def all_copied(copies: tuple[CheckpointCopyRecord, ...]) -> bool:
    return bool(copies) and all(copy.state == "copied" for copy in copies)


async def listed_copies(api: Api, run: RunRecord, key: str = ALICE) -> list[dict] | None:
    response = await (await api.client(key)).get(f"/api/v1/training_runs/{run.run_id}/checkpoints")
    return response.json()["checkpoints"][0]["copies"]


async def test_every_checkpoint_is_copied_and_the_listing_says_where(mirroring: Api, mirror: str) -> None:
    run = await mirroring.run()
    record = await mirroring.save(run, content=b"the weights")
    (copy,) = await until_copies(mirroring, record, all_copied)
    assert copy.url.startswith(f"{mirror}/") and copy.url.endswith(Path(record.directory).name)
    assert fsspec.filesystem("s3").cat_file(f"{copy.url}/adapter_model.safetensors") == b"the weights"
    told = await listed_copies(mirroring, run)
    assert told is not None and [(one["url"], one["state"]) for one in told] == [(copy.url, "copied")]
    client = await mirroring.client()
    assert (await client.get("/api/v1/checkpoints")).json()["checkpoints"][0]["copies"] == told
    await client.post(url(run, "weights/a", "/publish"))
    assert await listed_copies(mirroring, run, BOB) is None, "where they are is the owner's business"


async def test_a_copy_that_fails_fails_no_save_and_is_tried_again(mirroring: Api, s3: S3) -> None:
    s3.fails = lambda request: request.startswith("PUT")
    run = await mirroring.run()
    record = await mirroring.save(run)
    (copy,) = await until_copies(mirroring, record, lambda copies: copies[0].num_tries >= 2)
    assert (copy.state, await weights_of(mirroring, record)) == ("failed", b"weights")
    told = await listed_copies(mirroring, run)
    assert told is not None and "Internal Server Error" in told[0]["error"] and copy.url in told[0]["error"]
    s3.fails = lambda request: False
    (copy,) = await until_copies(mirroring, record, all_copied)
    assert copy.error is None and copy.num_tries >= 3


async def test_a_mirror_that_is_away_holds_up_no_other(tmp_path: Path, mirror: str, s3: S3) -> None:
    s3.fails = lambda request: "/away/" in request
    async with running_api(tmp_path, places=mirrored(f"s3://{BUCKET}/away", mirror)) as api:
        record = await api.save(await api.run())
        copies = await until_copies(api, record, lambda copies: any(copy.state == "copied" for copy in copies))
        assert {copy.mirror: copy.state for copy in copies}[mirror] == "copied"


async def test_unfinished_copies_go_on_after_a_restart_and_a_new_mirror_gets_what_there_is(
    tmp_path: Path, mirror: str, s3: S3
) -> None:
    other = f"memory://{mirror.rpartition('/')[2]}"
    s3.fails = lambda request: request.startswith("PUT")
    async with running_api(tmp_path, places=mirrored(mirror)) as api:
        record = await api.save(await api.run())
        await until_copies(api, record, lambda copies: copies[0].state == "failed")
    s3.fails = lambda request: False
    async with running_api(tmp_path, places=mirrored(mirror, other)) as api:
        copies = await until_copies(api, record, all_copied)
        assert [copy.mirror for copy in copies] == sorted([mirror, other])
        puts = len([request for request in s3.requests if request.startswith("PUT")])
    async with running_api(tmp_path, places=mirrored(mirror, other)):
        await asyncio.sleep(0.2)
    assert len([request for request in s3.requests if request.startswith("PUT")]) == puts, "once is enough"


async def test_why_copies_fail_is_told_once_for_a_mirror_and_again_when_it_changes(
    tmp_path: Path, mirror: str, s3: S3, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    config = replace(mirrored(f"file://{tmp_path}/file/mirror", mirror), pauses_seconds=(0.01, 0.01))
    (tmp_path / "file").touch()
    s3.fails = lambda request: "/mirror" in request
    async with running_api(tmp_path / "state", places=config) as api:
        run = await api.run()
        records = [await api.save(run, name) for name in ("a", "b")]
        for record in records:
            await until_copies(api, record, lambda copies: all(copy.num_tries >= 2 for copy in copies))
        first, second = sorted(told())
        assert first.startswith(f"file://{tmp_path}/file/mirror: no copies (") and "Not a directory" in first
        assert second.startswith(f"{mirror}: no copies (") and "Internal Server Error" in second
        (tmp_path / "file").unlink()
        s3.fails = lambda request: False
        for record in records:
            await until_copies(api, record, all_copied)
        s3.fails = lambda request: "/mirror" in request
        await until_copies(api, await api.save(run, "c"), lambda copies: any(copy.state == "failed" for copy in copies))
        assert len(told()) == 3 and told()[-1] == second


async def test_what_was_never_copied_to_a_mirror_is_forgotten_when_that_is_not_named_any_more(
    tmp_path: Path, mirror: str, s3: S3
) -> None:
    away = f"s3://{BUCKET}/away"
    s3.fails = lambda request: "/away/" in request
    async with running_api(tmp_path, places=mirrored(away, mirror)) as api:
        record = await api.save(await api.run())
        await until_copies(api, record, lambda copies: [copy.state for copy in copies] == ["failed", "copied"])
    async with running_api(tmp_path) as api:
        (copy,) = await api.services.store.list_copies([record.directory])
        assert (copy.mirror, copy.state) == (mirror, "copied"), "what was copied is still known"
    s3.fails = lambda request: False
    async with running_api(tmp_path, places=mirrored(away)) as api:
        assert len(await until_copies(api, record, all_copied)) == 2, "and once it is named again, it is copied"


async def test_removing_from_a_mirror_that_is_not_named_any_more_is_given_up_after_a_day(tmp_path: Path) -> None:
    away = "nofs://away"
    async with running_api(tmp_path) as api:
        run = await api.run()
        records = [await api.save(run, name) for name in ("given-up", "tried")]
        await api.services.checkpoints._mirror.close()
        for record, num_tries in zip(records, (34, 0), strict=True):
            copied = CheckpointCopyRecord(record.directory, away, f"{away}/a", "failed", "away", num_tries, 0.0)
            await api.services.store.put_copy(copied)
            await api.services.checkpoints._files.condemn(record.directory)
            await api.services.store.delete_checkpoint(record)
    async with running_api(tmp_path) as api:
        await until_copies(api, records[0], lambda copies: copies == ())
        (copy,) = await until_copies(api, records[1], lambda copies: copies[0].num_tries == 1)
        assert (copy.state, copy.mirror) == ("failed", away)


@pytest.mark.parametrize("damage", ["lost", "file lost", "changed", "manifest lost"])
async def test_what_is_lost_or_damaged_here_is_read_from_the_mirror(mirroring: Api, damage: str) -> None:
    run = await mirroring.run()
    record = await mirroring.save(run, kind="external_weights", content=b"right")
    await until_copies(mirroring, record, all_copied)
    directory = Path(record.directory)

    def hurt() -> None:
        match damage:
            case "lost":
                shutil.rmtree(directory)
            case "file lost":
                (directory / "adapter_model.safetensors").unlink()
            case "changed":
                (directory / "adapter_model.safetensors").write_bytes(b"wrong")
            case "manifest lost":
                (directory / "manifest.json").unlink()

    hurt()
    assert await weights_of(mirroring, record) == b"right"
    hurt()
    signed = (await urls_of(mirroring, run, "external_weights/a")).urls["adapter_model.safetensors"]
    assert (await fetch(mirroring, signed)).content == b"right"
    assert names_at(record.directory) == FILES, "it is mended, too"


async def test_a_damaged_copy_is_not_put_in_place_of_a_damaged_checkpoint(
    mirroring: Api, caplog: pytest.LogCaptureFixture
) -> None:
    record = await mirroring.save(await mirroring.run(), content=b"right")
    (copy,) = await until_copies(mirroring, record, all_copied)
    for place in (record.directory, copy.url):
        files, path = fsspec.core.url_to_fs(place)
        files.pipe_file(f"{path}/adapter_model.safetensors", b"wrong")
    with pytest.raises(OperationError, match=f"{record.tinker_path} cannot be read"):
        await weights_of(mirroring, record)
    assert re.search(f"{record.directory}.*{copy.url}.*not as its manifest says", caplog.text)


async def test_without_a_copy_damage_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_api(tmp_path) as api:
        record = await api.save(await api.run())
        (Path(record.directory) / "adapter_model.safetensors").write_bytes(b"wrong")
        with pytest.raises(OperationError, match="cannot be read"):
            await weights_of(api, record)
        assert re.search(r"not as its manifest says.*--mirror", caplog.text)


async def test_a_remote_checkpoint_that_is_lost_is_read_from_its_mirror(tmp_path: Path, mirror: str) -> None:
    places = replace(mirrored(mirror), checkpoints=f"memory://place-{mirror.rpartition('/')[2]}")
    async with running_api(tmp_path, places=places) as api:
        record = await api.save(await api.run(), content=b"right")
        await until_copies(api, record, all_copied)
        shutil.rmtree(tmp_path / "cache")
        fsspec.filesystem("memory").rm(record.directory, recursive=True)
        assert await weights_of(api, record) == b"right"


async def test_what_is_deleted_or_overwritten_goes_from_its_mirrors(tmp_path: Path, mirror: str, s3: S3) -> None:
    other = f"memory://{mirror.rpartition('/')[2]}"
    async with running_api(tmp_path, places=mirrored(mirror, other)) as api:
        run = await api.run()
        first = await api.save(run)
        await until_copies(api, first, all_copied)
        second = await api.save(run, overwrite=True)
        await until_copies(api, second, all_copied)
        await until_copies(api, first, lambda copies: copies == ())
        s3.fails = lambda request: not request.startswith("GET")
        await api.services.checkpoints.delete(second)
        await until_copies(api, second, lambda copies: any(copy.state == "failed" for copy in copies))
    s3.fails = lambda request: False
    async with running_api(tmp_path) as api:  # also from a mirror that is none any more
        await until_copies(api, second, lambda copies: copies == ())
    for place in (mirror, other):
        await until_names_at(place, [])


async def test_a_crash_behind_a_deletion_leaves_no_copy(tmp_path: Path, mirror: str) -> None:
    async with running_api(tmp_path, places=mirrored(mirror)) as api:
        record = await api.save(await api.run())
        await until_copies(api, record, all_copied)
        mirrors = api.services.checkpoints._mirror
        await mirrors.close()
        await api.services.checkpoints._files.condemn(record.directory)
        await mirrors._let_wait(record.directory)
        await api.services.store.delete_checkpoint(record)
    assert names_at(mirror)
    async with running_api(tmp_path, places=mirrored(mirror)) as api:
        await until_copies(api, record, lambda copies: copies == ())
    await until_names_at(mirror, [])


async def test_no_copy_is_made_of_what_is_removed_meanwhile(mirroring: Api, mirror: str, s3: S3) -> None:
    """One that was found to be due before: nobody would know of it, were the server killed behind the upload."""
    record = await mirroring.save(await mirroring.run())
    (copy,) = await until_copies(mirroring, record, all_copied)
    checkpoints = mirroring.services.checkpoints
    await checkpoints._mirror.close()
    await checkpoints._mirror._let_wait(record.directory)
    await mirroring.services.store.delete_checkpoint(record)  # its files are still there
    s3.requests.clear()
    is_removing, may_remove = threading.Event(), threading.Event()

    def wait(request: str) -> bool:
        if not request.startswith("GET"):
            is_removing.set()
            may_remove.wait(SOON_SECONDS)
        return False

    s3.fails = wait
    removing = asyncio.create_task(checkpoints._mirror._remove_due())
    await asyncio.to_thread(is_removing.wait, SOON_SECONDS)
    assert await asyncio.wait_for(checkpoints._mirror._copy(checkpoints._files, copy), SOON_SECONDS) is None
    may_remove.set()
    assert await removing is None
    assert await checkpoints._mirror._copy(checkpoints._files, copy) is None
    assert not any(request.startswith("PUT") for request in s3.requests)
    assert names_at(mirror) == [] and await mirroring.services.store.list_copies([record.directory]) == ()


async def test_a_copy_that_is_done_while_its_checkpoint_goes_is_still_to_be_removed(mirroring: Api) -> None:
    """Else nobody would remove it, were the server killed then."""
    record = await mirroring.save(await mirroring.run())
    (copy,) = await until_copies(mirroring, record, all_copied)
    checkpoints, store = mirroring.services.checkpoints, mirroring.services.store
    await checkpoints._mirror.close()
    async with checkpoints._mirror.forgetting(record.directory):
        await checkpoints._mirror._copy(checkpoints._files, copy)
        assert [one.state for one in await store.list_copies([record.directory])] == ["waiting"]
        await store.delete_checkpoint(record)
    await checkpoints._mirror._copy(checkpoints._files, copy)
    assert [one.state for one in await store.list_copies([record.directory])] == ["waiting"]


async def test_copies_follow_a_moved_state_directory(tmp_path: Path, mirror: str) -> None:
    async with running_api(tmp_path / "here", places=mirrored(mirror)) as api:
        run = await api.run()
        record = await api.save(run, content=b"moved")
        await until_copies(api, record, all_copied)
    (tmp_path / "here").rename(tmp_path / "there")
    async with running_api(tmp_path / "there", places=mirrored(mirror)) as api:
        record = await api.services.checkpoints.resolve(await api.tenant(), record.tinker_path)
        assert all_copied(await api.services.store.list_copies([record.directory]))
        shutil.rmtree(record.directory)
        assert await weights_of(api, record) == b"moved"
    assert [name.rpartition("/")[2] for name in names_at(mirror)] == FILES

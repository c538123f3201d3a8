"""Mirrors: checkpoints are copied in the background, retried, listed, read on damage, and deleted with the original."""

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
from trainhouse.server.files.storage_config import CheckpointStorageConfig
from trainhouse.server.store import CheckpointCopyRecord, CheckpointRecord, RunRecord

from ..api import ALICE, BOB, Api, running_api
from ..files.test_object_store import FILES, wait_for_names, weights_of
from ..s3 import BUCKET, S3, names_at
from .test_checkpoints import fetch, signed_urls, url

pytestmark = pytest.mark.anyio

SOON_SECONDS = 30.0


@pytest.fixture
def mirror(s3: S3, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields a URL that no other test uses."""
    s3.requests.clear()
    yield f"s3://{BUCKET}/mirror-{abs(hash(request.node.name))}"
    s3.fails = lambda request: False


def mirrored(*mirrors: str, **options) -> CheckpointStorageConfig:
    return CheckpointStorageConfig(mirrors=mirrors, retry_pauses_seconds=(), mirror_pause_seconds=0.05, **options)


@pytest.fixture
async def mirroring(mirror: str, tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "state", storage=mirrored(mirror)) as api:
        yield api


async def wait_for_copies(
    api: Api, record: CheckpointRecord, holds: Callable[[tuple[CheckpointCopyRecord, ...]], bool]
) -> tuple[CheckpointCopyRecord, ...]:
    async with asyncio.timeout(SOON_SECONDS):
        while not holds(copies := await api.services.store.copies.list_in([record.directory])):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return copies


def all_copied(copies: tuple[CheckpointCopyRecord, ...]) -> bool:
    return bool(copies) and all(copy.state == "copied" for copy in copies)


async def listed_copies(api: Api, run: RunRecord, key: str = ALICE) -> list[dict] | None:
    response = await (await api.client(key)).get(f"/api/v1/training_runs/{run.run_id}/checkpoints")
    return response.json()["checkpoints"][0]["copies"]


@pytest.mark.slow
async def test_every_checkpoint_is_copied_and_the_listing_says_where(mirroring: Api, mirror: str) -> None:
    run = await mirroring.run()
    record = await mirroring.save(run, content=b"the weights")
    (copy,) = await wait_for_copies(mirroring, record, all_copied)
    assert copy.url.startswith(f"{mirror}/") and copy.url.endswith(Path(record.directory).name)
    assert fsspec.filesystem("s3").cat_file(f"{copy.url}/adapter_model.safetensors") == b"the weights"
    reported = await listed_copies(mirroring, run)
    assert reported is not None and [(one["url"], one["state"]) for one in reported] == [(copy.url, "copied")]
    client = await mirroring.client()
    assert (await client.get("/api/v1/checkpoints")).json()["checkpoints"][0]["copies"] == reported
    await client.post(url(run, "weights/a", "/publish"))
    assert await listed_copies(mirroring, run, BOB) is None, "only the owner sees where the copies are"


async def test_a_failed_copy_does_not_fail_the_save_and_is_retried(mirroring: Api, s3: S3) -> None:
    s3.fails = lambda request: request.startswith("PUT")
    run = await mirroring.run()
    record = await mirroring.save(run)
    (copy,) = await wait_for_copies(mirroring, record, lambda copies: copies[0].num_tries >= 2)
    assert (copy.state, await weights_of(mirroring, record)) == ("failed", b"weights")
    reported = await listed_copies(mirroring, run)
    assert reported is not None and "Internal Server Error" in reported[0]["error"] and copy.url in reported[0]["error"]
    s3.fails = lambda request: False
    (copy,) = await wait_for_copies(mirroring, record, all_copied)
    assert copy.error is None and copy.num_tries >= 3


async def test_an_unreachable_mirror_does_not_delay_others(tmp_path: Path, mirror: str, s3: S3) -> None:
    s3.fails = lambda request: "/away/" in request
    async with running_api(tmp_path, storage=mirrored(f"s3://{BUCKET}/away", mirror)) as api:
        record = await api.save(await api.run())
        copies = await wait_for_copies(api, record, lambda copies: any(copy.state == "copied" for copy in copies))
        assert {copy.mirror: copy.state for copy in copies}[mirror] == "copied"


async def test_copying_resumes_after_a_restart_and_fills_a_new_mirror(tmp_path: Path, mirror: str, s3: S3) -> None:
    other = f"memory://{mirror.rpartition('/')[2]}"
    s3.fails = lambda request: request.startswith("PUT")
    async with running_api(tmp_path, storage=mirrored(mirror)) as api:
        record = await api.save(await api.run())
        await wait_for_copies(api, record, lambda copies: copies[0].state == "failed")
    s3.fails = lambda request: False
    async with running_api(tmp_path, storage=mirrored(mirror, other)) as api:
        copies = await wait_for_copies(api, record, all_copied)
        assert [copy.mirror for copy in copies] == sorted([mirror, other])
        puts = len([request for request in s3.requests if request.startswith("PUT")])
    async with running_api(tmp_path, storage=mirrored(mirror, other)):
        await asyncio.sleep(0.2)
    assert len([request for request in s3.requests if request.startswith("PUT")]) == puts, "once is enough"


async def test_a_failing_mirror_is_logged_once_until_it_recovers(
    tmp_path: Path, mirror: str, s3: S3, caplog: pytest.LogCaptureFixture
) -> None:
    def reported() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    config = replace(mirrored(f"file://{tmp_path}/file/mirror", mirror), retry_pauses_seconds=(0.01, 0.01))
    (tmp_path / "file").touch()
    s3.fails = lambda request: "/mirror" in request
    async with running_api(tmp_path / "state", storage=config) as api:
        run = await api.run()
        records = [await api.save(run, name) for name in ("a", "b")]
        for record in records:
            await wait_for_copies(api, record, lambda copies: all(copy.num_tries >= 2 for copy in copies))
        first, second = sorted(reported())
        assert first.startswith(f"file://{tmp_path}/file/mirror: copying failed (") and "Not a directory" in first
        assert second.startswith(f"{mirror}: copying failed (") and "Internal Server Error" in second
        (tmp_path / "file").unlink()
        s3.fails = lambda request: False
        for record in records:
            await wait_for_copies(api, record, all_copied)
        s3.fails = lambda request: "/mirror" in request
        await wait_for_copies(
            api, await api.save(run, "c"), lambda copies: any(copy.state == "failed" for copy in copies)
        )
        assert len(reported()) == 3 and reported()[-1] == second


async def test_failed_copies_at_a_removed_mirror_are_forgotten(tmp_path: Path, mirror: str, s3: S3) -> None:
    away = f"s3://{BUCKET}/away"
    s3.fails = lambda request: "/away/" in request
    async with running_api(tmp_path, storage=mirrored(away, mirror)) as api:
        record = await api.save(await api.run())
        await wait_for_copies(api, record, lambda copies: [copy.state for copy in copies] == ["failed", "copied"])
    async with running_api(tmp_path) as api:
        (copy,) = await api.services.store.copies.list_in([record.directory])
        assert (copy.mirror, copy.state) == (mirror, "copied"), "finished copies are remembered"
    s3.fails = lambda request: False
    async with running_api(tmp_path, storage=mirrored(away)) as api:
        assert len(await wait_for_copies(api, record, all_copied)) == 2, (
            "it is copied when the mirror is configured again"
        )


async def test_deletions_at_a_removed_mirror_are_given_up_after_a_day(tmp_path: Path) -> None:
    away = "nofs://away"
    async with running_api(tmp_path) as api:
        run = await api.run()
        records = [await api.save(run, name) for name in ("given-up", "tried")]
        await api.services.checkpoints._mirror.close()
        for record, num_tries in zip(records, (34, 0), strict=True):
            copied = CheckpointCopyRecord(record.directory, away, f"{away}/a", "failed", "away", num_tries, 0.0)
            await api.services.store.copies.put(copied)
            await api.services.checkpoints.files.mark_deleted(record.directory)
            await api.services.store.checkpoints.delete(record)
    async with running_api(tmp_path) as api:
        await wait_for_copies(api, records[0], lambda copies: copies == ())
        (copy,) = await wait_for_copies(api, records[1], lambda copies: copies[0].num_tries == 1)
        assert (copy.state, copy.mirror) == ("failed", away)


@pytest.mark.parametrize("damage", ["lost", "file lost", "changed", "manifest lost"])
async def test_a_lost_or_damaged_checkpoint_is_read_from_its_mirror(mirroring: Api, damage: str) -> None:
    run = await mirroring.run()
    record = await mirroring.save(run, kind="external_weights", content=b"right")
    await wait_for_copies(mirroring, record, all_copied)
    directory = Path(record.directory)

    def damage_it() -> None:
        match damage:
            case "lost":
                shutil.rmtree(directory)
            case "file lost":
                (directory / "adapter_model.safetensors").unlink()
            case "changed":
                (directory / "adapter_model.safetensors").write_bytes(b"wrong")
            case "manifest lost":
                (directory / "manifest.json").unlink()

    damage_it()
    assert await weights_of(mirroring, record) == b"right"
    damage_it()
    signed = (await signed_urls(mirroring, run, "external_weights/a")).urls["adapter_model.safetensors"]
    assert (await fetch(mirroring, signed)).content == b"right"
    assert names_at(record.directory) == FILES, "the local files are repaired"


async def test_a_damaged_copy_does_not_replace_a_damaged_checkpoint(
    mirroring: Api, caplog: pytest.LogCaptureFixture
) -> None:
    record = await mirroring.save(await mirroring.run(), content=b"right")
    (copy,) = await wait_for_copies(mirroring, record, all_copied)
    for place in (record.directory, copy.url):
        files, path = fsspec.core.url_to_fs(place)
        files.pipe_file(f"{path}/adapter_model.safetensors", b"wrong")
    with pytest.raises(OperationError, match=f"{record.tinker_path} cannot be read"):
        await weights_of(mirroring, record)
    assert re.search(f"{record.directory}.*{copy.url}.*does not match its manifest", caplog.text)


async def test_damage_without_a_copy_is_logged_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_api(tmp_path) as api:
        record = await api.save(await api.run())
        (Path(record.directory) / "adapter_model.safetensors").write_bytes(b"wrong")
        with pytest.raises(OperationError, match="cannot be read"):
            await weights_of(api, record)
        assert re.search(r"does not match its manifest.*--mirror", caplog.text)


async def test_a_lost_remote_checkpoint_is_read_from_its_mirror(tmp_path: Path, mirror: str) -> None:
    storage = replace(mirrored(mirror), checkpoints=f"memory://place-{mirror.rpartition('/')[2]}")
    async with running_api(tmp_path, storage=storage) as api:
        record = await api.save(await api.run(), content=b"right")
        await wait_for_copies(api, record, all_copied)
        shutil.rmtree(tmp_path / "cache")
        fsspec.filesystem("memory").rm(record.directory, recursive=True)
        assert await weights_of(api, record) == b"right"


@pytest.mark.slow
async def test_deleting_or_overwriting_removes_the_copies(tmp_path: Path, mirror: str, s3: S3) -> None:
    other = f"memory://{mirror.rpartition('/')[2]}"
    async with running_api(tmp_path, storage=mirrored(mirror, other)) as api:
        run = await api.run()
        first = await api.save(run)
        await wait_for_copies(api, first, all_copied)
        second = await api.save(run, overwrite=True)
        await wait_for_copies(api, second, all_copied)
        await wait_for_copies(api, first, lambda copies: copies == ())
        s3.fails = lambda request: not request.startswith("GET")
        await api.services.checkpoints.delete(second)
        await wait_for_copies(api, second, lambda copies: any(copy.state == "failed" for copy in copies))
    s3.fails = lambda request: False
    async with running_api(tmp_path) as api:  # also at a mirror that is no longer configured
        await wait_for_copies(api, second, lambda copies: copies == ())
    for place in (mirror, other):
        await wait_for_names(place, [])


async def mark_waiting(api: Api, record: CheckpointRecord) -> None:
    """Leaves the rows of the copies as a deletion does before it deletes the checkpoint's own row."""
    copies = api.services.store.copies
    for copy in await copies.list_in([record.directory]):
        await copies.put(replace(copy, state="waiting", error=None, num_tries=0))


async def test_a_crash_after_a_deletion_leaves_no_copy(tmp_path: Path, mirror: str) -> None:
    async with running_api(tmp_path, storage=mirrored(mirror)) as api:
        record = await api.save(await api.run())
        await wait_for_copies(api, record, all_copied)
        await api.services.checkpoints._mirror.close()
        await api.services.checkpoints.files.mark_deleted(record.directory)
        await mark_waiting(api, record)
        await api.services.store.checkpoints.delete(record)
    assert names_at(mirror)
    async with running_api(tmp_path, storage=mirrored(mirror)) as api:
        await wait_for_copies(api, record, lambda copies: copies == ())
    await wait_for_names(mirror, [])


async def test_a_checkpoint_deleted_meanwhile_is_not_copied(mirroring: Api, mirror: str, s3: S3) -> None:
    """The copy was found to be due before the deletion. If the server were killed after the upload, no row would refer
    to it.
    """
    record = await mirroring.save(await mirroring.run())
    (copy,) = await wait_for_copies(mirroring, record, all_copied)
    files, mirrors = mirroring.services.checkpoints.files, mirroring.services.checkpoints._mirror
    await mirrors.close()
    await mark_waiting(mirroring, record)
    await mirroring.services.store.checkpoints.delete(record)  # its files still exist
    s3.requests.clear()
    is_removing, may_remove = threading.Event(), threading.Event()

    def wait(request: str) -> bool:
        if not request.startswith("GET"):
            is_removing.set()
            may_remove.wait(SOON_SECONDS)
        return False

    s3.fails = wait
    removing = asyncio.create_task(mirrors._remove_due())
    await asyncio.to_thread(is_removing.wait, SOON_SECONDS)
    assert await asyncio.wait_for(mirrors._copy(files, copy), SOON_SECONDS) is None
    may_remove.set()
    assert await removing is None
    assert await mirrors._copy(files, copy) is None
    assert not any(request.startswith("PUT") for request in s3.requests)
    assert names_at(mirror) == [] and await mirroring.services.store.copies.list_in([record.directory]) == ()


async def test_a_copy_finished_during_a_deletion_is_still_removed(mirroring: Api) -> None:
    """Otherwise the copy would remain if the server were killed at that moment."""
    record = await mirroring.save(await mirroring.run())
    (copy,) = await wait_for_copies(mirroring, record, all_copied)
    checkpoints, store = mirroring.services.checkpoints, mirroring.services.store
    mirrors = checkpoints._mirror
    await mirrors.close()
    async with mirrors.deleting(record.directory):
        await mirrors._copy(checkpoints.files, copy)
        assert [one.state for one in await store.copies.list_in([record.directory])] == ["waiting"]
        await store.checkpoints.delete(record)
    await mirrors._copy(checkpoints.files, copy)
    assert [one.state for one in await store.copies.list_in([record.directory])] == ["waiting"]


async def test_copies_follow_a_moved_state_directory(tmp_path: Path, mirror: str) -> None:
    async with running_api(tmp_path / "here", storage=mirrored(mirror)) as api:
        run = await api.run()
        record = await api.save(run, content=b"moved")
        await wait_for_copies(api, record, all_copied)
    (tmp_path / "here").rename(tmp_path / "there")
    async with running_api(tmp_path / "there", storage=mirrored(mirror)) as api:
        record = await api.services.checkpoints.resolve(await api.tenant(), record.tinker_path)
        assert all_copied(await api.services.store.copies.list_in([record.directory]))
        shutil.rmtree(record.directory)
        assert await weights_of(api, record) == b"moved"
    assert [name.rpartition("/")[2] for name in names_at(mirror)] == FILES

"""Checkpoints at a URL: uploaded with the manifest last, read through a cache, swept, copied, signed and deleted."""

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import fsspec
import pytest
from tinker import types
from trainhouse.schemas.errors import OperationError
from trainhouse.server.files.checkpoint_cache import CheckpointCache
from trainhouse.server.files.object_store import ObjectStore, ObjectStoreError, check_url
from trainhouse.server.files.storage_config import CheckpointStorageConfig
from trainhouse.server.store import CheckpointRecord

from ..api import Api, running_api
from ..checkpoints.test_checkpoints import fetch, listed, signed_urls, url
from ..s3 import BUCKET, S3, names_at

pytestmark = pytest.mark.anyio

SOON_SECONDS = 30.0


@pytest.fixture
def place(s3: S3, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields a URL that no other test uses."""
    s3.requests.clear()
    yield f"s3://{BUCKET}/{abs(hash(request.node.name))}"
    s3.fails = lambda request: False


def config(place: str, **options) -> CheckpointStorageConfig:
    return CheckpointStorageConfig(place, retry_pauses_seconds=(0.01, 0.01, 0.01), mirror_pause_seconds=0.1, **options)


@pytest.fixture
async def remote(place: str, tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with running_api(tmp_path, storage=config(place)) as api:
        yield api


async def wait_for_names(url: str, names: list[str]) -> None:
    async with asyncio.timeout(SOON_SECONDS):
        while [name.rpartition("/")[2] for name in names_at(url)] != names:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def weights_of(api: Api, record: CheckpointRecord) -> bytes:
    async with api.services.checkpoints.reading(record) as directory:
        return (directory / "adapter_model.safetensors").read_bytes()


FILES = ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]


async def test_a_checkpoint_is_uploaded_with_its_manifest_last(remote: Api, s3: S3, place: str) -> None:
    record = await remote.save(await remote.run(), content=b"0123456789")
    assert record.directory.startswith(place) and record.size_bytes == 12
    puts = [request.rpartition("/")[2] for request in s3.requests if request.startswith("PUT")]
    assert puts == FILES
    assert [path.name for path in remote.services.config.store.state_dir.rglob("adapter_*")] == []
    assert await weights_of(remote, record) == b"0123456789"


async def test_a_checkpoint_is_read_from_the_cache_and_checked_there(remote: Api, s3: S3) -> None:
    record = await remote.save(await remote.run(), content=b"right")
    assert await weights_of(remote, record) == b"right"
    s3.requests.clear()
    assert await weights_of(remote, record) == b"right"
    assert s3.requests == []
    (cached,) = remote.services.config.store.state_dir.glob("cache/*/adapter_model.safetensors")
    cached.write_bytes(b"wrong")
    assert await weights_of(remote, record) == b"right"
    assert s3.requests != []


async def test_files_that_do_not_match_the_manifest_are_not_read(remote: Api, caplog: pytest.LogCaptureFixture) -> None:
    record = await remote.save(await remote.run(), content=b"right")
    fsspec.filesystem("s3").pipe_file(f"{record.directory}/adapter_model.safetensors", b"wrong")
    with pytest.raises(OperationError, match=f"{record.tinker_path} cannot be read") as failure:
        await weights_of(remote, record)
    assert failure.value.category == "server" and record.directory not in str(failure.value)
    assert f"{record.directory}: adapter_model.safetensors does not match its manifest" in caplog.text


async def test_a_manifest_cannot_name_files_outside_its_directory(
    remote: Api, caplog: pytest.LogCaptureFixture
) -> None:
    record = await remote.save(await remote.run())
    manifest = f"{record.directory}/manifest.json"
    files = fsspec.filesystem("s3")
    files.pipe_file(manifest, files.cat_file(manifest).replace(b'"adapter_config.json"', b'"../../escaped"'))
    with pytest.raises(OperationError, match="cannot be read"):
        await weights_of(remote, record)
    assert "outside the directory" in caplog.text


async def test_transient_failures_are_retried(remote: Api, s3: S3) -> None:
    s3.fails = lambda request: request.startswith("PUT") and s3.requests.count(request) <= 3
    record = await remote.save(await remote.run(), content=b"at last")
    s3.fails = lambda request: request.startswith("GET") and s3.requests.count(request) <= 2
    assert await weights_of(remote, record) == b"at last"


async def test_a_failed_save_names_url_and_reason_and_leaves_nothing(remote: Api, s3: S3, place: str) -> None:
    s3.fails = lambda request: request.startswith("PUT") and request.endswith("manifest.json")
    run = await remote.run()
    with pytest.raises(OperationError, match=f"weights/a could not be saved: {place}/.*Internal Server") as failure:
        await remote.save(run)
    assert failure.value.category == "server"
    assert await listed(remote, run) == {}
    await wait_for_names(place, [])


async def test_permanent_failures_are_not_retried(tmp_path: Path, place: str, s3: S3) -> None:
    nowhere = f"s3://no-such-{BUCKET}"
    async with running_api(tmp_path, storage=config(nowhere)) as api:
        with pytest.raises(OperationError, match=f"{nowhere}/.*bucket does not exist"):
            await api.save(await api.run())
    assert sum(request.startswith("PUT") for request in s3.requests) == 1


async def test_unpublished_files_are_swept_and_foreign_ones_stay(tmp_path: Path, place: str, s3: S3) -> None:
    files = fsspec.filesystem("s3")
    async with running_api(tmp_path, storage=config(place)) as api:
        run = await api.run()
        await api.save(run)
        kind = f"{place}/{run.run_id.replace(':', '_')}/weights"
        files.pipe_file(f"{kind}/torn.00000000/adapter_model.safetensors", b"half")
        files.pipe_file(f"{kind}/whole.00000000/manifest.json", b"of a newer database")
        files.pipe_file(f"{place}/of_another_database/weights/b.00000000/adapter_model.safetensors", b"half")
        before = names_at(place)
    async with running_api(tmp_path, storage=config(place)) as api:
        async with asyncio.timeout(SOON_SECONDS):
            while (after := names_at(place)) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert [name for name in before if name not in after] == [
            f"{run.run_id.replace(':', '_')}/weights/torn.00000000/adapter_model.safetensors"
        ]
        assert list(await listed(api, run)) == ["weights/a"]


async def test_a_checkpoint_published_during_a_sweep_stays(remote: Api, place: str, s3: S3) -> None:
    """The sweep lists the files before the manifest is uploaded, and reads the rows just before the row is added."""
    checkpoints, store, run = remote.services.checkpoints, remote.services.store, await remote.run()
    may_continue = threading.Event()
    s3.fails = lambda request: request.endswith("manifest.json") and not may_continue.wait(SOON_SECONDS)
    saving = asyncio.create_task(remote.save(run))
    async with asyncio.timeout(SOON_SECONDS):
        while len(names_at(place)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def rows_of_before() -> frozenset[str]:
        rows = await store.checkpoints.list_directories()
        may_continue.set()
        await saving
        return rows

    await checkpoints.files.sweep_url({run.run_id.replace(":", "_")}, rows_of_before)
    assert await weights_of(remote, await saving) == b"weights"


async def test_a_hanging_upload_is_abandoned_at_shutdown(tmp_path: Path, place: str, s3: S3) -> None:
    may_continue = threading.Event()
    s3.fails = lambda request: request.startswith("PUT") and not may_continue.wait(SOON_SECONDS)
    async with running_api(tmp_path, storage=config(place)) as api:
        run = await api.run()
        saving = asyncio.create_task(api.save(run))
        async with asyncio.timeout(SOON_SECONDS):
            while not any(request.startswith("PUT") for request in s3.requests):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        saving.cancel()
        await asyncio.sleep(0.2)
        assert not saving.done(), "an upload under way may finish"
        api.services.checkpoints.schedule_transfer_cancellation()
        done, _ = await asyncio.wait({saving}, timeout=SOON_SECONDS / 2)
        assert done and saving.cancelled()
        assert await listed(api, run) == {}
    may_continue.set()


async def test_transfers_after_close_are_cancelled_at_once(tmp_path: Path) -> None:
    object_store = ObjectStore((60.0,))
    object_store.close()
    task = asyncio.create_task(object_store.manifest(tmp_path.as_uri()))
    await asyncio.wait({task}, timeout=SOON_SECONDS)
    assert task.cancelled()


async def test_deleting_overwriting_and_expiring_remove_the_files(remote: Api, place: str) -> None:
    run = await remote.run()
    await remote.save(run, content=b"first")
    second = await remote.save(run, content=b"second", overwrite=True)
    await wait_for_names(place, FILES)
    assert await weights_of(remote, second) == b"second"
    assert (await (await remote.client()).delete(url(run, "weights/a"))).status_code == 204
    await wait_for_names(place, [])
    await remote.save(run, "b", ttl_seconds=60)
    remote.clock.now += 60
    await remote.services.checkpoints.expire()
    await wait_for_names(place, [])
    assert list(remote.services.config.store.state_dir.glob("cache/*")) == []


async def test_a_copy_is_made_at_the_store_without_a_download(remote: Api, s3: S3) -> None:
    source = await remote.save(await remote.run(), content=b"shared")
    s3.requests.clear()
    response = await (await remote.client()).post("/api/v1/copy_weights", json={"source_path": source.tinker_path})
    path = types.CopyWeightsResponse.model_validate(response.json()).tinker_path
    assert not any(request.startswith("GET") and "adapter_model" in request for request in s3.requests)
    await remote.services.checkpoints.delete(source)
    copy = await remote.services.checkpoints.resolve(await remote.tenant(), path)
    assert (await weights_of(remote, copy), copy.size_bytes) == (b"shared", source.size_bytes)


async def test_signed_urls_download_through_the_server(remote: Api) -> None:
    run = await remote.run()
    await remote.save(run, kind="external_weights", content=b"the weights")
    signed = (await signed_urls(remote, run, "external_weights/a")).urls["adapter_model.safetensors"]
    assert (await fetch(remote, signed)).content == b"the weights"
    ranged = await (await remote.client(None)).get(signed, headers={"Range": "bytes=4-6"})
    assert (ranged.status_code, ranged.content) == (206, b"wei")


async def test_a_failed_download_is_answered_503_and_logged(
    remote: Api, s3: S3, caplog: pytest.LogCaptureFixture
) -> None:
    run = await remote.run()
    await remote.save(run, kind="external_weights")
    (signed, *_) = (await signed_urls(remote, run, "external_weights/a")).urls.values()
    s3.fails = lambda request: request.startswith("GET")
    response = await fetch(remote, signed)
    assert response.status_code == 503 and "s3://" not in response.json()["detail"]
    assert "s3://" in caplog.text


async def test_a_save_is_recognized_by_its_request_id(remote: Api) -> None:
    run = await remote.run()
    await remote.save(run, request_id="mine")
    for request_id, was_saved in (("mine", True), ("another's", False)):
        assert await remote.services.checkpoints.was_saved(run, "weights", "a", request_id) is was_saved


async def test_checkpoints_stay_readable_after_the_place_changes(tmp_path: Path, place: str) -> None:
    async with running_api(tmp_path) as api:
        run = await api.run()
        await api.save(run, "local", content=b"local")
    for storage, name in ((config(place), "remote"), (CheckpointStorageConfig(str(tmp_path / "other")), "other")):
        async with running_api(tmp_path, storage=storage) as api:
            await api.save(run, name, content=name.encode())
    async with running_api(tmp_path) as api:
        for name in ("local", "remote", "other"):
            path = f"tinker://{run.run_id}/weights/{name}"
            record = await api.services.checkpoints.resolve(await api.tenant(), path)
            assert await weights_of(api, record) == name.encode()


def test_the_cache_evicts_the_least_recently_used(tmp_path: Path) -> None:
    cache = CheckpointCache(tmp_path, 250)
    paths = [cache.path(f"s3://b/{number}") for number in range(4)]
    for number, path in enumerate(paths[:3]):
        path.mkdir()
        (path / "file").write_bytes(bytes(100))
        os.utime(path, (1000 + number, 1000 + number))
    with cache.hold(paths[0]):
        cache.touch(paths[2])
    assert [path.exists() for path in paths[:3]] == [True, False, True]
    (paths[3]).mkdir()
    (paths[3] / "file").write_bytes(bytes(100))
    cache.touch(paths[3])
    assert [path.exists() for path in paths] == [False, False, True, True], "recently used entries stay"


def test_the_cache_evicts_nothing_that_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, rmtree = CheckpointCache(tmp_path, 0), shutil.rmtree
    old, new = cache.path("s3://b/old"), cache.path("s3://b/new")
    for path in (old, new):
        path.mkdir()
        (path / "file").touch()
    (old / "file").write_bytes(b"x")
    os.utime(old, (1000, 1000))
    is_removing, may_remove = threading.Event(), threading.Event()

    def slow(path: Path, **options: bool) -> None:
        is_removing.set()
        may_remove.wait(SOON_SECONDS)
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)
    making_room = threading.Thread(target=cache.touch, args=(new,))
    making_room.start()
    assert is_removing.wait(SOON_SECONDS)
    with cache.hold(old):
        was_there = old.exists()
        may_remove.set()
        making_room.join()
        assert old.exists() == was_there
        cache.touch(new)
        assert old.exists() == was_there
    assert not old.exists()


@pytest.mark.parametrize("scheme", ["file", "memory"])
async def test_other_kinds_of_urls_work(tmp_path: Path, scheme: str) -> None:
    place = f"{scheme}://{tmp_path}/place"
    async with running_api(tmp_path / "state", storage=config(place)) as api:
        record = await api.save(await api.run(), content=b"anywhere")
        assert await weights_of(api, record) == b"anywhere"
        await api.services.checkpoints.delete(record)
        await wait_for_names(place, [])


async def test_a_directory_without_a_manifest_is_no_checkpoint(tmp_path: Path, place: str) -> None:
    fsspec.filesystem("s3").pipe_file(f"{place}/r/k/n.0/file", b"x")
    object_store = ObjectStore(())
    with pytest.raises(ObjectStoreError, match=f"{place}/r/k/n.0"):
        await object_store.download(f"{place}/r/k/n.0", tmp_path)
    object_store.close()


@pytest.mark.parametrize(
    "url, words", [("nofs://b", "does not support nofs"), ("sftp://user:secret@host/p", "FSSPEC_SFTP_PASSWORD")]
)
def test_unsupported_urls_are_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        check_url(url)
    assert "secret" not in str(refusal.value)

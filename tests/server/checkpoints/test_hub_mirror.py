"""Mirrors at hf://: one private repository, one commit for each checkpoint, and only what the hub does not have yet is
sent. The hub is a local server (see ..hub).
"""

import asyncio
import hashlib
import logging
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from trainhouse.server.config.option_values import ConfigError
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.files.manifest import write_manifest
from trainhouse.server.files.object_store import ObjectStore, ObjectStoreError, check_url
from trainhouse.server.store import CheckpointRecord
from trainhouse.workers.protocol.worker_config import ServedModel

from ..api import Api, running_api
from ..files.test_object_store import FILES, weights_of
from ..hub import TOKEN, Hub, hub_server
from ..s3 import names_at
from .test_mirror import SOON_SECONDS, all_copied, listed_copies, mirrored, wait_for_copies

# huggingface_hub uploads files through a parameter that its HTTP client deprecates.
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]

REPOSITORY = "alice/checkpoints"
MIRROR = f"hf://{REPOSITORY}/server-1"
UPLOAD = """import asyncio, sys
from pathlib import Path
from trainhouse.server.files.object_store import ObjectStore
asyncio.run(ObjectStore(()).upload(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "hub").mkdir()
    with hub_server(tmp_path / "hub") as running:
        yield running


@pytest.fixture
async def mirroring(hub: Hub, tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "state", storage=mirrored(MIRROR)) as api:
        yield api


async def copied(api: Api, name: str = "a", content: bytes = b"the weights") -> CheckpointRecord:
    """Saves a checkpoint and waits for its copy."""
    record = await api.save(await api.run(), name, content=content)
    await wait_for_copies(api, record, all_copied)
    return record


def commits(hub: Hub) -> int:
    return sum(" /api/models/" in request and "/commit/" in request for request in hub.requests)


async def test_a_checkpoint_is_one_commit_in_a_private_repository(mirroring: Api, hub: Hub) -> None:
    record = await copied(mirroring)
    (copy,) = await mirroring.services.store.copies.list_in([record.directory])
    assert copy.url.startswith(f"{MIRROR}/") and copy.url.endswith(Path(record.directory).name)
    assert hub.repositories[REPOSITORY].is_private and commits(hub) == 1
    below = copy.url.removeprefix(f"hf://{REPOSITORY}/")
    assert sorted(hub.files(REPOSITORY)) == [f"{below}/{name}" for name in FILES]
    assert hub.content(hub.files(REPOSITORY)[f"{below}/adapter_model.safetensors"]) == b"the weights"
    await copied(mirroring, "b", b"other weights")
    assert commits(hub) == 2 and len(hub.files(REPOSITORY)) == 6


async def test_a_lost_checkpoint_is_restored_and_a_deleted_one_is_removed(mirroring: Api, hub: Hub) -> None:
    record = await copied(mirroring, content=b"right")
    kept = await copied(mirroring, "kept")
    shutil.rmtree(record.directory)
    assert await weights_of(mirroring, record) == b"right"
    assert names_at(record.directory) == FILES
    await mirroring.services.checkpoints.delete(record)
    await wait_for_copies(mirroring, record, lambda copies: copies == ())
    assert {path.split("/")[-2] for path in hub.files(REPOSITORY)} == {Path(kept.directory).name}
    assert commits(hub) == 3


async def test_damage_at_the_hub_does_not_reach_a_restored_checkpoint(
    mirroring: Api, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    record = await copied(mirroring, content=b"right")
    hub.object_path(hashlib.sha256(b"right").hexdigest()).write_bytes(b"wrong")
    shutil.rmtree(record.directory)
    with pytest.raises(Exception, match="cannot be read"):
        await weights_of(mirroring, record)
    assert "does not match its manifest (its hash differs)" in caplog.text


@pytest.mark.parametrize("name", FILES)
async def test_a_file_that_the_hub_stored_damaged_fails_the_copy(mirroring: Api, hub: Hub, name: str) -> None:
    hub.damages = lambda path: path.endswith(name)
    run = await mirroring.run()
    record = await mirroring.save(run)
    (copy,) = await wait_for_copies(mirroring, record, lambda copies: copies[0].num_tries >= 2)
    assert copy.state == "failed", "also when the damaged copy is looked at again"
    assert f"the hub's hash of {name} differs" in str(copy.error)
    hub.damages = lambda path: False
    await wait_for_copies(mirroring, record, all_copied)


def checkpoint(directory: Path, **files: bytes) -> Path:
    directory.mkdir()
    for name, content in files.items():
        (directory / f"{name}.safetensors").write_bytes(content)
    (directory / "adapter_config.json").write_bytes(b"{}")
    write_manifest(directory, {})
    return directory


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


async def test_an_upload_continues_after_kill_9_with_what_is_missing(hub: Hub, tmp_path: Path) -> None:
    # More than the buffers of a connection hold, whose content would arrive after the sender's death.
    files = {"first": b"1" * 300_000, "second": b"2" * (32 << 20)}
    source, url = checkpoint(tmp_path / "checkpoint", **files), f"{MIRROR}/r/weights/a.1"
    first, second = (hashlib.sha256(content).hexdigest() for content in files.values())
    may_continue = threading.Event()

    def arriving(sha256: str, num_bytes: int) -> None:
        if sha256 == second and num_bytes > 200_000:
            may_continue.wait(SOON_SECONDS)

    hub.arriving = arriving
    process = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", UPLOAD, str(source), url])
    await asyncio.to_thread(wait_until, lambda: hub.object_path(first).is_file() and hub.received[second] > 200_000)
    process.send_signal(signal.SIGKILL)
    process.wait()
    may_continue.set()
    before = hub.received[second]
    assert before > 200_000 and hub.files(REPOSITORY) == {}, "no part of a checkpoint is visible"
    object_store = ObjectStore(())
    assert not await object_store.holds(url, source)
    await object_store.upload(source, url)
    assert await object_store.holds(url, source)
    assert hub.received[first] == 300_000, "it was there already"
    assert hub.received[second] >= 200_000 + len(files["second"])
    sent = sum(hub.received.values())
    await object_store.upload(source, url)
    assert sum(hub.received.values()) == sent and commits(hub) == 1, "nothing is sent twice"
    object_store.close()


async def test_large_files_are_uploaded_in_parts(hub: Hub, tmp_path: Path) -> None:
    hub.part_bytes = 1000
    source = checkpoint(tmp_path / "checkpoint", first=bytes(range(256)) * 10)
    object_store = ObjectStore(())
    await object_store.upload(source, f"{MIRROR}/r/weights/a.1")
    (tmp_path / "back").mkdir()
    await object_store.download(f"{MIRROR}/r/weights/a.1", tmp_path / "back")
    assert (tmp_path / "back/first.safetensors").read_bytes() == bytes(range(256)) * 10
    assert sum("/storage/" in request and ".part-" in request for request in hub.requests) == 3
    object_store.close()


@pytest.mark.parametrize("failing", ["/commit/", "PUT /storage/"])
async def test_copying_continues_after_a_restart(hub: Hub, tmp_path: Path, failing: str) -> None:
    hub.fails = lambda request: failing in request
    async with running_api(tmp_path / "state", storage=mirrored(MIRROR)) as api:
        record = await api.save(await api.run(), content=b"the weights")
        (copy,) = await wait_for_copies(api, record, lambda copies: copies[0].state == "failed")
        assert re.search(r"the hub answered 507 no room for http://\S+$", str(copy.error))
        assert "signature" not in str(copy.error), "the hub's answer had a signed URL"
    hub.fails = lambda request: False
    async with running_api(tmp_path / "state", storage=mirrored(MIRROR)) as api:
        await wait_for_copies(api, record, all_copied)
    assert sum(hub.received.values()) == len(b"the weights")


@pytest.mark.parametrize("is_in_file", [False, True])
async def test_a_refused_token_is_reported_with_the_remedy_and_never_shown(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_in_file: bool
) -> None:
    def give(token: str) -> None:
        if is_in_file:
            (tmp_path / "token").write_text(f"{token}\n")
        else:
            monkeypatch.setenv("HF_TOKEN", token)

    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    caplog.set_level(logging.INFO)
    give("hf_refused")
    async with running_api(tmp_path / "state", storage=mirrored(MIRROR)) as api:
        run = await api.run()
        record = await api.save(run)
        (copy,) = await wait_for_copies(api, record, lambda copies: copies[0].num_tries >= 2)
        reason = r"the hub refuses access \(401 .*Bearer \*\*\*\): give a token .* in HF_TOKEN, or in the file"
        assert copy.state == "failed" and re.search(reason, str(copy.error)), "the hub's answer had the token"
        assert await weights_of(api, record) == b"weights"
        shown = str(await listed_copies(api, run))
        give(TOKEN)
        await wait_for_copies(api, record, all_copied)
    assert "the hub refuses access" in caplog.text and "the hub refuses access" in shown
    stored = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
    for secret in ("hf_refused", TOKEN):
        assert secret not in caplog.text + shown and secret.encode() not in stored


async def test_a_public_repository_gets_no_checkpoints(mirroring: Api, hub: Hub) -> None:
    hub.create(REPOSITORY, is_private=False)
    record = await mirroring.save(await mirroring.run())
    (copy,) = await wait_for_copies(mirroring, record, lambda copies: copies[0].state == "failed")
    assert f"{REPOSITORY} is a public repository" in str(copy.error) and hub.files(REPOSITORY) == {}
    hub.repositories[REPOSITORY].is_private = True
    await wait_for_copies(mirroring, record, all_copied)


async def test_a_mirror_can_have_its_own_branch(hub: Hub, tmp_path: Path) -> None:
    async with running_api(tmp_path / "state", storage=mirrored(f"hf://{REPOSITORY}@server-1")) as api:
        record = await copied(api, content=b"right")
        assert len(hub.files(REPOSITORY, "server-1")) == 3 and hub.files(REPOSITORY) == {}
        shutil.rmtree(record.directory)
        assert await weights_of(api, record) == b"right"
        await api.services.checkpoints.delete(record)
        await wait_for_copies(api, record, lambda copies: copies == ())
    assert hub.files(REPOSITORY, "server-1") == {}


async def test_a_removal_is_retried_until_the_hub_can_be_reached(mirroring: Api, hub: Hub) -> None:
    record = await copied(mirroring)
    hub.fails = lambda request: True
    await mirroring.services.checkpoints.delete(record)
    await wait_for_copies(mirroring, record, lambda copies: copies[0].state == "failed")
    hub.fails = lambda request: False
    await wait_for_copies(mirroring, record, lambda copies: copies == ())
    assert hub.files(REPOSITORY) == {}


async def test_uploads_leave_the_event_loop_free(hub: Hub, tmp_path: Path) -> None:
    may_continue, was_in_time = threading.Event(), list[bool]()
    hub.arriving = lambda sha256, num_bytes: was_in_time.append(may_continue.wait(SOON_SECONDS))
    async with running_api(tmp_path / "state", storage=mirrored(MIRROR)) as api:
        record = await api.save(await api.run())
        async with asyncio.timeout(SOON_SECONDS):
            while not hub.received:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await weights_of(api, record) == b"weights"
        may_continue.set()
        await wait_for_copies(api, record, all_copied)
    assert all(was_in_time), "the loop ran while the upload waited"


@pytest.mark.parametrize("url", ["hf://alice", "hf://datasets/alice/data", "hf://buckets/alice/b", "hf://a/b/c//d"])
def test_other_places_of_the_hub_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected hf://OWNER/REPO\[@REVISION\]"):
        check_url(url)
    check_url("hf://alice/checkpoints@main/a/b")


def test_checkpoints_themselves_are_not_stored_at_the_hub(tmp_path: Path) -> None:
    models = (ServedModel("tiny/qwen3", str(tmp_path)),)
    with pytest.raises(ConfigError, match=r"every save would wait for a commit.*--mirror"):
        ServerConfig.of(base_models=models, checkpoints=MIRROR)
    assert ServerConfig.of(base_models=models, mirrors=(MIRROR,)).storage_config().mirrors == (MIRROR,)


async def test_a_missing_copy_is_reported_as_such(hub: Hub) -> None:
    hub.create(REPOSITORY, is_private=True)
    object_store = ObjectStore(())
    with pytest.raises(ObjectStoreError, match=r"manifest\.json is missing"):
        await object_store.manifest(f"{MIRROR}/r/weights/none.1")
    with pytest.raises(ObjectStoreError, match="does not have it, or not for this token"):
        await object_store.manifest("hf://alice/none/r/weights/none.1")
    await object_store.remove(f"{MIRROR}/r/weights/none.1")
    object_store.close()

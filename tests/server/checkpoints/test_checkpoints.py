"""The life of a checkpoint: atomic publication, expiry, sharing, copies, signed URLs, and recovery of lost rows."""

import asyncio
import hashlib
import json
import os
import shutil
import sqlite3
import stat
import threading
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Message, Receive, Scope, Send
from tinker import types
from trainhouse.schemas.errors import OperationError, RequestError
from trainhouse.server.checkpoints.copies import copy_checkpoint
from trainhouse.server.checkpoints.downloads import sign_files
from trainhouse.server.files.manifest import check_directory
from trainhouse.server.store import DATABASE_NAME, CheckpointRecord, RunRecord

from ..api import ALICE, BOB, LORA, MODEL, Api, running_api, session_record

pytestmark = pytest.mark.anyio


def files_below(api: Api) -> list[str]:
    root = api.services.config.store.state_dir / "checkpoints"
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def exists(record: CheckpointRecord) -> bool:
    return Path(record.directory).is_dir()


def weights_of(record: CheckpointRecord) -> bytes:
    return (Path(record.directory) / "adapter_model.safetensors").read_bytes()


async def listed(api: Api, run: RunRecord, key: str = ALICE) -> dict[str, types.Checkpoint]:
    response = await (await api.client(key)).get(f"/api/v1/training_runs/{run.run_id}/checkpoints")
    if response.status_code == 404:
        return {}
    answer = types.CheckpointsListResponse.model_validate(response.json())
    return {checkpoint.checkpoint_id: checkpoint for checkpoint in answer.checkpoints}


def url(run: RunRecord, checkpoint_id: str, action: str = "") -> str:
    return f"/api/v1/training_runs/{run.run_id}/checkpoints/{checkpoint_id}{action}"


async def test_a_checkpoint_is_published_with_sizes_and_hashes(api: Api) -> None:
    run = await api.run()
    record = await api.save(run, content=b"0123456789")
    manifest = json.loads((Path(record.directory) / "manifest.json").read_text())
    assert manifest["tinker_path"] == f"tinker://{run.run_id}/weights/a" == record.tinker_path
    assert manifest["training"]["rank"] == LORA.rank
    assert manifest["files"]["adapter_model.safetensors"] == {
        "size_bytes": 10,
        "sha256": hashlib.sha256(b"0123456789").hexdigest(),
    }
    assert record.size_bytes == 12
    assert (await listed(api, run))["weights/a"].size_bytes == 12


async def test_nothing_is_listed_before_the_write_finishes(api: Api) -> None:
    run = await api.run()
    async with api.services.checkpoints.writing(run, "weights", "a", overwrite=False) as staging:
        (staging / "file").write_bytes(b"x")
        assert await listed(api, run) == {}
    assert list(await listed(api, run)) == ["weights/a"]


@pytest.mark.parametrize("error", [OperationError("the worker died", "server"), asyncio.CancelledError()])
async def test_an_exception_while_writing_leaves_nothing(api: Api, error: BaseException) -> None:
    run = await api.run()
    with pytest.raises(type(error)):
        async with api.services.checkpoints.writing(run, "weights", "a", overwrite=False) as staging:
            (staging / "file").write_bytes(b"x")
            raise error
    assert (files_below(api), await listed(api, run)) == ([], {})


async def test_a_row_that_cannot_be_written_leaves_no_files(api: Api) -> None:
    stranger = RunRecord("unknown:train:0", "unknown", "nobody", MODEL, LORA, 1.0, 1.0)
    with pytest.raises((SQLAlchemyError, OperationError)):
        await api.save(stranger)
    assert files_below(api) == []


@pytest.mark.parametrize("num_turns", [0, 1, 2, 4, 8, 16, 32])
async def test_a_caller_cancelled_at_any_moment_leaves_row_and_files_together(api: Api, num_turns: int) -> None:
    run = await api.run()
    saving = asyncio.create_task(api.save(run))
    for _ in range(num_turns):
        await asyncio.sleep(0.001)
    saving.cancel()
    await asyncio.gather(saving, return_exceptions=True)
    assert bool(files_below(api)) == bool(await listed(api, run))


async def test_a_save_cancelled_twice_still_publishes_whole_files(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    run, fsync = await api.run(), os.fsync
    is_sealing, may_seal = threading.Event(), threading.Event()

    def slow(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            is_sealing.set()
            may_seal.wait(10)
        fsync(handle)

    saving = asyncio.create_task(api.save(run))
    await asyncio.sleep(0)
    monkeypatch.setattr(os, "fsync", slow)
    await asyncio.to_thread(is_sealing.wait, 10)
    for _ in range(2):
        saving.cancel()
        await asyncio.sleep(0.05)
    assert not saving.done()
    may_seal.set()
    await asyncio.gather(saving, return_exceptions=True)
    record = await api.services.store.checkpoints.get(run.run_id, "weights", "a")
    assert saving.cancelled() and record is not None
    check_directory(Path(record.directory))


async def test_names_that_could_escape_the_directory_are_refused(api: Api) -> None:
    run = await api.run()
    for name in ("", ".", "..", ".hidden", "a/b", "../a", "a b", "a\n", "x" * 129, "ä"):
        with pytest.raises(OperationError, match="is not allowed"):
            await api.save(run, name)
    assert files_below(api) == []
    await api.save(run, "x" * 128)


async def test_a_name_in_use_needs_overwrite(api: Api) -> None:
    run = await api.run()
    first = await api.save(run, content=b"first")
    with pytest.raises(OperationError, match="overwrite=True") as refused:
        await api.save(run, content=b"second")
    assert refused.value.category == "user"
    assert weights_of(first) == b"first"
    await api.save(run, kind="sampler_weights", content=b"of another kind")

    second = await api.save(run, content=b"second", overwrite=True)
    assert weights_of(second) == b"second"
    assert not exists(first)
    assert set(await listed(api, run)) == {"weights/a", "sampler_weights/a"}


async def test_a_restart_keeps_published_checkpoints_and_sweeps_the_rest(tmp_path: Path) -> None:
    async with running_api(tmp_path) as api:
        run = await api.run()
        record = await api.save(run)
        kind = Path(record.directory).parent
        (kind / ".staging-torn").mkdir()
        (kind / ".staging-torn" / "adapter_model.safetensors").write_bytes(b"half")
        (kind / "b.00000000").mkdir()  # renamed, but the server died before its row was written
        elsewhere = kind.parent.parent / "of_another_database" / "weights" / "c.00000000"
        elsewhere.mkdir(parents=True)
        assert list(await listed(api, run)) == ["weights/a"]
    async with running_api(tmp_path) as api:
        assert list(await listed(api, run)) == ["weights/a"]
        assert [path.name for path in kind.iterdir()] == [Path(record.directory).name]
        assert elsewhere.exists()


async def test_unlisted_checkpoints_without_a_tenant_are_kept_for_30_days(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier version wrote these, without a tenant in the manifest and without marks on deleted checkpoints."""
    state, older = tmp_path / "state", tmp_path / "older"
    async with running_api(state) as api:
        run = await api.run()
    shutil.copytree(state, older)
    async with running_api(state) as api:
        record = await api.save(run)
        remove_tenant_from_manifest(record)
        torn = replace(record, directory=f"{record.directory[:-8]}00000000")
        shutil.copytree(record.directory, torn.directory)
        os.truncate(f"{torn.directory}/adapter_model.safetensors", 1)
    newer = shutil.copytree(state, tmp_path / "newer")
    (state / DATABASE_NAME).unlink()
    shutil.copy2(older / DATABASE_NAME, state)
    for _ in range(2):
        async with running_api(state) as api:
            assert await listed(api, run) == {}
            assert exists(record) and not exists(torn)
        assert f"{record.directory} is complete but has no row" in caplog.text and "in 30 days" in caplog.text
    shutil.copy2(newer / DATABASE_NAME, state)  # the newer database, which has the row
    async with running_api(state) as api:
        assert list(await listed(api, run)) == ["weights/a"]
        async with api.services.checkpoints.reading(record):
            pass
    assert not (Path(record.directory) / ".unlisted").exists()
    shutil.copy2(older / DATABASE_NAME, state)
    for days, stays in ((0, True), (29, True), (31, False)):
        if days:
            since = time.time() - days * 86400
            os.utime(Path(record.directory) / ".unlisted", (since, since))
        async with running_api(state):
            assert exists(record) == stays


def remove_tenant_from_manifest(record: CheckpointRecord) -> None:
    manifest = Path(record.directory) / "manifest.json"
    about = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({name: value for name, value in about.items() if not name.startswith("tenant")}))


def read_database(state: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in state.glob(f"{DATABASE_NAME}*") if not path.name.endswith("shm")}


def restore_with_damaged_wal(state: Path, before: dict[Path, bytes]) -> None:
    """Restores the files of the database with the first frame of the write-ahead log damaged, so that SQLite reads none
    of the log.
    """
    for path in state.glob(f"{DATABASE_NAME}*"):
        path.unlink()
    for path, content in before.items():
        damaged = bytearray(content)
        if path.name.endswith("-wal"):
            damaged[100] ^= 1
        path.write_bytes(damaged)


async def lose_rows(state: Path, num_known: int) -> list[CheckpointRecord]:
    """Saves three checkpoints and damages the write-ahead log after the row of the num_known-th.

    With 0, the rows of the run, its session and its tenant are lost as well. The second checkpoint is deleted before,
    but its files remain, as after a crash.
    """
    saved: list[CheckpointRecord] = []

    def flush_wal() -> None:
        with closing(sqlite3.connect(state / DATABASE_NAME)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    async with running_api(state) as api:
        if not num_known:
            flush_wal()
        run = await api.run()
        for number, name in enumerate("abc", 1):
            saved.append(await api.save(run, name, content=name.encode(), user_metadata={"name": name}))
            if number == num_known:
                flush_wal()
        files = Path(saved[1].directory)
        kept = shutil.copytree(files, state / "kept")
        await api.services.checkpoints.files.mark_deleted(saved[1].directory)
        shutil.copytree(files, kept, dirs_exist_ok=True)
        await api.services.checkpoints.delete(saved[1])
        kept.rename(files)
        before = read_database(state)
    restore_with_damaged_wal(state, before)
    return saved


@pytest.mark.parametrize("num_known", [0, 1])
async def test_a_damaged_write_ahead_log_loses_no_checkpoint_whose_files_are_whole(
    tmp_path: Path, num_known: int, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = await lose_rows(tmp_path, num_known)
    for _ in range(2):
        async with running_api(tmp_path) as api:
            answer = (await (await api.client()).get("/api/v1/checkpoints")).json()["checkpoints"]
            assert {one["tinker_path"]: one["user_metadata"] for one in answer} == {
                a.tinker_path: {"name": "a"},
                c.tinker_path: {"name": "c"},
            }
            for one in (a, c):
                found = await api.services.checkpoints.resolve(await api.tenant(), one.tinker_path)
                async with api.services.checkpoints.reading(found) as files:
                    assert (files / "adapter_model.safetensors").read_bytes() == one.name.encode()
                assert replace(found, directory="") == replace(one, directory="")
            assert not exists(b), "deleted checkpoints stay deleted"
    assert len([line for line in caplog.messages if "its row is restored" in line]) == 2 - num_known


async def test_a_lost_row_is_restored_for_the_overwriting_checkpoint_only(tmp_path: Path) -> None:
    async with running_api(tmp_path) as api:
        run = await api.run()
        with closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        first = await api.save(run, content=b"first")
        kept = shutil.copytree(first.directory, tmp_path / "kept")
        (kept / ".deleted").touch()
        second = await api.save(run, content=b"second", overwrite=True)
        kept.rename(first.directory)
    with closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as database:
        database.execute("DELETE FROM checkpoints")
        database.commit()
    async with running_api(tmp_path) as api:
        found = await api.services.checkpoints.resolve(await api.tenant(), second.tinker_path)
        assert found.directory == second.directory and not exists(first)


async def test_a_server_starts_although_an_unlisted_mark_cannot_be_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """This happens on a read-only file system."""
    async with running_api(tmp_path) as api:
        run = await api.run()
        record = await api.save(run)
    (Path(record.directory) / ".unlisted").mkdir()
    async with running_api(tmp_path) as api:
        assert list(await listed(api, run)) == ["weights/a"]
    assert ".unlisted cannot be removed: " in caplog.text


async def test_a_state_directory_can_be_moved(tmp_path: Path) -> None:
    async with running_api(tmp_path / "here") as api:
        run = await api.run()
        await api.save(run, content=b"moved")
    (tmp_path / "here").rename(tmp_path / "there")
    async with running_api(tmp_path / "there") as api:
        record = await api.services.checkpoints.resolve(await api.tenant(), f"tinker://{run.run_id}/weights/a")
        assert weights_of(record) == b"moved"


async def test_a_server_on_a_copied_state_directory_leaves_the_original_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original, copied = tmp_path / "original", tmp_path / "copied"
    async with running_api(original) as api:
        run = await api.run()
        lost, kept = [await api.save(run, name) for name in ("lost", "kept")]
    shutil.copytree(original, copied)
    shutil.rmtree(copied / Path(lost.directory).relative_to(original))
    async with running_api(copied) as api:
        checkpoints, tenant = api.services.checkpoints, await api.tenant()
        assert "1 checkpoints of this database are stored in another server's state directory" in caplog.text
        mine = await checkpoints.resolve(tenant, lost.tinker_path)
        with pytest.raises(OperationError, match=f"{mine.tinker_path} cannot be read: its files are lost"):
            async with checkpoints.reading(mine):
                pass
        assert f"cannot be read: {mine.directory}" in caplog.text
        for one in (mine, await checkpoints.resolve(tenant, kept.tinker_path)):
            assert one.directory.startswith(f"{copied}/")
            await checkpoints.delete(one)
    assert exists(lost) and exists(kept)


async def test_checkpoints_copied_after_the_state_directory_are_found(tmp_path: Path) -> None:
    original, copied = tmp_path / "original", tmp_path / "copied"
    async with running_api(original) as api:
        record = await api.save(await api.run())
    shutil.copytree(original, copied, ignore=shutil.ignore_patterns("checkpoints"))
    async with running_api(copied):
        pass
    shutil.copytree(original / "checkpoints", copied / "checkpoints", dirs_exist_ok=True)
    async with running_api(copied) as api:
        mine = await api.services.checkpoints.resolve(await api.tenant(), record.tinker_path)
        assert weights_of(mine) == b"weights" and mine.directory.startswith(f"{copied}/")


async def test_expired_checkpoints_are_unlisted_at_once_and_deleted_later(api: Api) -> None:
    run = await api.run()
    record = await api.save(run, ttl_seconds=3600)
    kept = await api.save(run, "kept")
    expires_at = (await listed(api, run))["weights/a"].expires_at
    assert expires_at == datetime.fromtimestamp(api.clock.now + 3600, UTC)
    api.clock.now += 3600
    assert list(await listed(api, run)) == ["weights/kept"]
    with pytest.raises(RequestError, match="no checkpoint"):
        await api.services.checkpoints.resolve(await api.tenant(), record.tinker_path)
    await api.services.checkpoints.expire()
    assert not exists(record) and exists(kept)


async def test_an_expired_name_is_free_again(api: Api) -> None:
    run = await api.run()
    await api.save(run, ttl_seconds=3600)
    api.clock.now += 3600
    await api.save(run, content=b"new")
    assert (await listed(api, run))["weights/a"].expires_at is None


async def test_ttl_can_be_set_and_removed(api: Api) -> None:
    run = await api.run()
    await api.save(run)
    client = await api.client()
    assert (await client.put(url(run, "weights/a", "/ttl"), json={"ttl_seconds": 7200})).status_code == 204
    expires_at = (await listed(api, run))["weights/a"].expires_at
    assert expires_at is not None and expires_at.timestamp() == api.clock.now + 7200
    assert (await client.put(url(run, "weights/a", "/ttl"), json={"ttl_seconds": None})).status_code == 204
    assert (await listed(api, run))["weights/a"].expires_at is None
    assert (await client.put(url(run, "weights/a", "/ttl"), json={"ttl_seconds": 5})).status_code in (400, 422)


async def test_delete_removes_row_and_files(api: Api) -> None:
    run = await api.run()
    await api.save(run)
    client = await api.client()
    assert (await client.delete(url(run, "weights/a"))).status_code == 204
    assert (files_below(api), await listed(api, run)) == ([], {})
    assert (await client.delete(url(run, "weights/a"))).status_code == 404


async def test_other_tenants_can_read_but_not_change_public_checkpoints(api: Api) -> None:
    run = await api.run(ALICE)
    record = await api.save(run)
    alice, bob = await api.client(ALICE), await api.client(BOB)
    bobs = await api.tenant(BOB)
    assert (await alice.post(url(run, "weights/a", "/publish"))).status_code == 204
    assert (await listed(api, run))["weights/a"].public
    assert await api.services.checkpoints.resolve(bobs, record.tinker_path)
    assert list(await listed(api, run, BOB)) == ["weights/a"]
    assert (await bob.delete(url(run, "weights/a"))).status_code == 403
    assert (await bob.delete(url(run, "weights/a", "/publish"))).status_code == 403
    assert (await alice.delete(url(run, "weights/a", "/publish"))).status_code == 204
    with pytest.raises(RequestError, match="not yours to read"):
        await api.services.checkpoints.resolve(bobs, record.tinker_path)


async def test_private_checkpoints_are_not_found_by_other_tenants(api: Api) -> None:
    run = await api.run(ALICE)
    await api.save(run)
    bob = await api.client(BOB)
    path = f"tinker://{run.run_id}/weights/a"
    answers = [
        await bob.delete(url(run, "weights/a")),
        await bob.post(url(run, "weights/a", "/publish")),
        await bob.delete(url(run, "weights/a", "/publish")),
        await bob.put(url(run, "weights/a", "/ttl"), json={"ttl_seconds": 3600}),
        await bob.get(url(run, "weights/a", "/external_weights_urls")),
        await bob.get(f"/api/v1/training_runs/{run.run_id}/checkpoints"),
        await bob.post("/api/v1/weights_info", json={"tinker_path": path}),
        await bob.post("/api/v1/copy_weights", json={"source_path": path}),
    ]
    assert [answer.status_code for answer in answers] == [404] * len(answers)
    assert list(await listed(api, run)) == ["weights/a"]


async def test_the_owners_key_works_as_an_access_token(api: Api) -> None:
    run = await api.run(ALICE)
    record = await api.save(run)
    bob = await api.tenant(BOB)
    assert await api.services.checkpoints.resolve(bob, record.tinker_path, access_token=ALICE)
    with pytest.raises(RequestError):
        await api.services.checkpoints.resolve(bob, record.tinker_path, access_token="tml-somebody")


@pytest.mark.parametrize(
    "path", ["weights/a", "tinker://r/weights", "tinker://r/other/a", "tinker://r/weights/a/b", ""]
)
async def test_malformed_paths_are_answered_400_rather_than_404(api: Api, path: str) -> None:
    response = await (await api.client()).post("/api/v1/weights_info", json={"tinker_path": path})
    assert response.status_code == 400 and "tinker://RUN_ID/weights/NAME" in response.json()["detail"]


async def test_weights_info_describes_how_to_load_the_checkpoint(api: Api) -> None:
    record = await api.save(await api.run())
    response = await (await api.client()).post("/api/v1/weights_info", json={"tinker_path": record.tinker_path})
    info = types.WeightsInfoResponse.model_validate(response.json())
    assert (info.base_model, info.is_lora, info.lora_rank, info.train_unembed) == (MODEL, True, 8, False)
    assert info.optimizer_config.type == "adamw"


async def signed_urls(
    api: Api, run: RunRecord, checkpoint_id: str, key: str = ALICE
) -> types.ExternalWeightsUrlsResponse:
    response = await (await api.client(key)).get(url(run, checkpoint_id, "/external_weights_urls"))
    return types.ExternalWeightsUrlsResponse.model_validate(response.json())


async def fetch(api: Api, signed_url: str) -> httpx.Response:
    """Downloads from a signed URL without sending an API key."""
    parts = urlsplit(signed_url)
    return await (await api.client(None)).get(f"{parts.path}?{parts.query}")


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
async def test_signed_urls_download_every_file_without_a_key(api: Api, kind: str) -> None:
    run = await api.run()
    await api.save(run, kind=kind, content=b"the weights")
    signed = await signed_urls(api, run, f"{kind}/a")
    assert set(signed.urls) == {"adapter_model.safetensors", "adapter_config.json"}
    assert signed.expires.timestamp() > api.clock.now
    response = await fetch(api, signed.urls["adapter_model.safetensors"])
    assert (response.status_code, response.content) == (200, b"the weights")
    assert response.headers["Content-Length"] == "11"


async def test_a_signature_is_valid_for_one_file_expiry_and_version(api: Api) -> None:
    run = await api.run()
    await api.save(run, kind="external_weights")
    good = (await signed_urls(api, run, "external_weights/a")).urls["adapter_config.json"]
    assert (await fetch(api, good)).status_code == 200
    expires = str(int(api.clock.now) + 3600)
    forged = [
        good.replace("adapter_config.json", "adapter_model.safetensors"),
        good.replace("adapter_config.json", "manifest.json"),
        good.replace("adapter_config.json", "..%2F..%2F..%2F..%2Ftrainhouse.db"),
        good.replace(expires, str(int(expires) + 1)),
        good[:-1] + ("0" if good[-1] != "0" else "1"),
        good.replace("external_weights/a", "external_weights/b"),
    ]
    assert len({good, *forged}) == 7
    assert [(await fetch(api, one)).status_code for one in forged] == [403] * 6
    await api.save(run, kind="external_weights", overwrite=True)
    assert (await fetch(api, good)).status_code == 403


async def test_signed_urls_expire(api: Api) -> None:
    run = await api.run()
    await api.save(run, kind="external_weights")
    (good, *_) = (await signed_urls(api, run, "external_weights/a")).urls.values()
    api.clock.now += 3600
    response = await fetch(api, good)
    assert response.status_code == 403 and "expired" in response.json()["detail"]


async def test_signed_urls_survive_a_restart(tmp_path: Path) -> None:
    async with running_api(tmp_path) as api:
        run = await api.run()
        await api.save(run, kind="external_weights")
        (good, *_) = (await signed_urls(api, run, "external_weights/a")).urls.values()
    async with running_api(tmp_path) as api:
        assert (await fetch(api, good)).status_code == 200


async def test_a_damaged_secret_is_not_used(tmp_path: Path) -> None:
    """Any client could sign URLs with an empty secret."""
    async with running_api(tmp_path):
        secret = tmp_path / "url_secret"
        assert secret.stat().st_mode & 0o777 == 0o600
    secret.write_bytes(b"")
    with pytest.raises(ValueError, match="url_secret is damaged"):
        async with running_api(tmp_path):
            pass


async def copy(api: Api, key: str, **body: object) -> httpx.Response:
    headers = {"X-Idempotency-Key": str(body.pop("idempotency_key", "one"))}
    return await (await api.client(key)).post("/api/v1/copy_weights", json=body, headers=headers)


async def test_an_idempotency_key_belongs_to_one_request(api: Api) -> None:
    run = await api.run(ALICE)
    sources = [(await api.save(run, name)).tinker_path for name in ("a", "b")]
    body = {"source_path": sources[0], "ttl_seconds": 3600, "destination_project_id": "p"}
    answers = [await copy(api, ALICE, **body) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    for other in ({"source_path": sources[1]}, {"ttl_seconds": 3601}, {"destination_project_id": None}):
        refused = await copy(api, ALICE, **(body | other))
        assert refused.status_code == 400 and "by a different request" in refused.json()["detail"]


async def test_a_copy_belongs_to_its_tenant_and_outlives_its_source(api: Api) -> None:
    run = await api.run(ALICE)
    source = await api.save(run, content=b"shared", user_metadata={"k": "v"})
    await (await api.client(ALICE)).post(url(run, "weights/a", "/publish"))
    response = await copy(api, BOB, source_path=source.tinker_path, destination_project_id="p")
    path = types.CopyWeightsResponse.model_validate(response.json()).tinker_path
    await (await api.client(ALICE)).delete(url(run, "weights/a"))

    record = await api.services.checkpoints.resolve(await api.tenant(BOB), path)
    assert (record.kind, record.name, record.training, record.user_metadata) == ("weights", "a", LORA, {"k": "v"})
    assert weights_of(record) == b"shared"
    copied_run = await api.services.store.runs.get(record.run_id)
    session = await api.services.store.sessions.get(copied_run.session_id)
    assert (session.project_id, session.end) == ("p", "success")
    with pytest.raises(RequestError):
        await api.services.checkpoints.resolve(await api.tenant(ALICE), path)


async def test_a_copy_requested_twice_is_made_once(api: Api) -> None:
    source = await api.save(await api.run())
    paths = [(await copy(api, ALICE, source_path=source.tinker_path)).json()["tinker_path"] for _ in range(2)]
    assert paths[0] == paths[1]
    another = await copy(api, ALICE, source_path=source.tinker_path, idempotency_key="two")
    assert another.json()["tinker_path"] != paths[0]


async def test_the_owners_key_authorizes_a_copy(api: Api) -> None:
    source = await api.save(await api.run(ALICE))
    response = await copy(api, BOB, source_path=source.tinker_path, weights_access_token=ALICE, ttl_seconds=3600)
    record = await api.services.checkpoints.resolve(await api.tenant(BOB), response.json()["tinker_path"])
    assert record.expires_at == api.clock.now + 3600


async def test_a_checkpoint_replaced_while_it_is_read_is_answered_409(api: Api) -> None:
    """The answer is 409 rather than a server error, because the client can retry."""
    client, run = await api.client(), await api.run()
    old = await api.save(run, "a")
    await api.save(run, "a", overwrite=True)
    tenant = await api.tenant()
    session = session_record("copy", tenant.id, finished_at=1.0, end="success")
    with pytest.raises(RequestError, match="deleted or replaced while it was read") as refused:
        await copy_checkpoint(api.services.checkpoints, old, session, None)
    assert refused.value.status == 409
    with pytest.raises(RequestError, match="deleted or replaced") as refused:
        await sign_files(api.services.checkpoints, old)
    assert refused.value.status == 409
    copied = await client.post("/api/v1/copy_weights", json={"source_path": old.tinker_path})
    assert copied.status_code == 200


async def test_files_stay_while_they_are_read_and_are_removed_then(api: Api) -> None:
    """A checkpoint deleted in the middle of a copy, a load or a download does not fail it."""
    record = await api.save(await api.run(), content=b"whole")
    checkpoints = api.services.checkpoints
    async with checkpoints.reading(record):
        async with checkpoints.reading(record) as files:
            await checkpoints.delete(record)
            assert (files / "adapter_model.safetensors").read_bytes() == b"whole"
            with pytest.raises(OperationError, match="was deleted or replaced while it was read"):
                async with checkpoints.reading(record):
                    pass
        assert exists(record)
    assert not exists(record)


@pytest.mark.parametrize("kind", ["file", "archive"])
async def test_a_checkpoint_deleted_before_its_download_begins_is_sent_whole(api: Api, kind: str) -> None:
    client, run = await api.client(), await api.run()
    record = await api.save(run, content=b"whole")
    asked = {"file": "/external_weights_urls", "archive": "/archive"}[kind]
    signed = (await client.get(url(run, "weights/a", asked), headers={"Accept": "application/json"})).json()
    address = signed["urls"]["adapter_model.safetensors"] if kind == "file" else signed["url"]

    async def deleting(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_later(message: Message) -> None:
            if message["type"] == "http.response.start":
                await api.services.checkpoints.delete(record)
            await send(message)

        await api.app(scope, receive, send_later)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=deleting), base_url="http://test") as browser:
        answer = await browser.get(address)
    assert answer.status_code == 200 and b"whole" in answer.content
    assert not exists(record)

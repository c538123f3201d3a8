"""Checkpoints: names <-> places. Written aside, published by one rename and one row, aged, copied, given access to.

Layout below state_dir/checkpoints: RUN/KIND/NAME.VERSION, with .staging-* beside them while they are written. A
directory without a row is nothing and is swept at start: a torn checkpoint is never listed, and one saved over
another is the new one or the old one.
"""

import asyncio
import hmac
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from ..schemas.errors import OperationError, RequestError
from .auth import Auth, Tenant
from .manifest import listed_files, read_manifest, seal, sync_directory
from .store import CheckpointKind, CheckpointRecord, RunRecord, SessionRecord, Store

logger = logging.getLogger(__name__)

MANIFEST_FORMAT = 1
URL_LIFETIME_SECONDS = 3600
_STAGING = ".staging-"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_EXPIRY_PERIOD_SECONDS = 10.0
_SECRET_BYTES = 32


class Checkpoints:
    """The owner may do everything; everyone reads what is public, and whoever shows the owner's key as access token."""

    def __init__(self, store: Store, auth: Auth, state_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._auth = auth
        self._root = state_dir.absolute() / "checkpoints"
        self._secret_file = state_dir / "url_secret"
        self._secret = b""
        self._clock = clock
        self._aging: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Sweeps what a crash left behind, and from now on deletes what expires."""
        self._secret = await asyncio.to_thread(_load_secret, self._secret_file)
        published = await self._follow_moved_root(await self._store.list_checkpoint_directories())
        runs = {directory_name(run_id) for run_id in await self._store.list_run_ids()}
        await asyncio.to_thread(_sweep, self._root, runs, published)
        self._aging = asyncio.create_task(self._expire_in_time())

    async def close(self) -> None:
        if self._aging is not None:
            self._aging.cancel()
            await asyncio.gather(self._aging, return_exceptions=True)

    @asynccontextmanager
    async def writing(
        self,
        run: RunRecord,
        kind: CheckpointKind,
        name: str,
        overwrite: bool,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
        has_optimizer: bool = False,
        request_id: str | None = None,
    ) -> AsyncIterator[Path]:
        """An empty directory to write into; leaving the block publishes it, an exception leaves nothing.

        request_id: of the save. Raises OperationError (user): a bad name, or one in use without `overwrite`. The run
        must be in the store.
        """
        draft = self._draft(run, kind, check_name(name), ttl_seconds, user_metadata, has_optimizer)
        if not overwrite:
            await self._require_free(draft)

        async def insert(record: CheckpointRecord) -> None:
            replaced = await self._store.put_checkpoint(record, overwrite)
            if replaced is not None:
                await asyncio.to_thread(_remove, Path(replaced.directory))

        async with self._publishing(draft, insert, request_id) as staging:
            yield staging

    async def was_saved(self, run: RunRecord, kind: CheckpointKind, name: str, request_id: str) -> bool:
        """Whether this very save published it, before a crash took its answer."""
        record = await self._find(run.run_id, kind, name)
        return record is not None and await asyncio.to_thread(_saved_by, Path(record.directory)) == request_id

    async def resolve(self, tenant: Tenant, path: str, access_token: str | None = None) -> CheckpointRecord:
        """The checkpoint, for reading. Raises RequestError: 400 not a path, 404 not there or not for this tenant."""
        record = await self._find(*parse_path(path))
        if record is None or not await self._may_read(tenant, record, access_token):
            raise _missing(path)
        return record

    async def known(self, path: str) -> CheckpointRecord | None:
        """For whoever was allowed to read it before."""
        return await self._find(*parse_path(path))

    async def owned(self, tenant: Tenant, run_id: str, checkpoint_id: str) -> CheckpointRecord:
        """The tenant's own, for changing it. checkpoint_id: KIND/NAME.

        Raises RequestError 400, 404, and 403 for another tenant's that is public.
        """
        path = f"tinker://{run_id}/{checkpoint_id}"
        record = await self.resolve(tenant, path)
        if record.tenant_id != tenant.id:
            raise RequestError(f"checkpoint {path} belongs to another tenant: it can be read, not changed", status=403)
        return record

    async def delete(self, checkpoint: CheckpointRecord) -> None:
        await self._store.delete_checkpoint(checkpoint)
        await asyncio.to_thread(_remove, Path(checkpoint.directory))

    async def set_public(self, checkpoint: CheckpointRecord, public: bool) -> None:
        await self._store.set_checkpoint_public(checkpoint, public)

    async def set_ttl(self, checkpoint: CheckpointRecord, ttl_seconds: int | None) -> None:
        """From now on; None = for ever."""
        await self._store.set_checkpoint_expiry(checkpoint, self._expiry(ttl_seconds))

    async def copy(self, source: CheckpointRecord, to: SessionRecord, ttl_seconds: int | None) -> CheckpointRecord:
        """A copy whose run is new and cannot be trained on: `to`, not in the store yet, has ended already.

        The files are shared with the source where the file system can. The same idempotency key of the same tenant
        answers the same copy.
        """
        if known := await self._store.find_copy(to):
            return known
        now = self._clock()
        run = RunRecord(
            run_id=f"{to.session_id}:train:0",
            session_id=to.session_id,
            tenant_id=to.tenant_id,
            base_model=source.base_model,
            lora=source.lora,
            created_at=now,
            last_request_at=now,
            user_metadata={"copied_from": source.tinker_path},
        )
        draft = self._draft(run, source.kind, source.name, ttl_seconds, source.user_metadata, source.has_optimizer)
        async with self._publishing(draft, lambda record: self._store.insert_copy(to, run, record)) as staging:
            await asyncio.to_thread(_link_files, Path(source.directory), staging)
        return await self.resolve(Tenant(to.tenant_id, ""), draft.tinker_path)

    async def sign_files(self, checkpoint: CheckpointRecord) -> "list[SignedFile]":
        """What can be downloaded without a key for the next URL_LIFETIME_SECONDS."""
        expires = int(self._clock()) + URL_LIFETIME_SECONDS
        files = await asyncio.to_thread(listed_files, Path(checkpoint.directory))
        return [SignedFile(file, expires, self._signature(checkpoint, file, expires)) for file in files]

    async def signed_file(self, path: str, signed: "SignedFile") -> Path:
        """The file of a checkpoint that `sign_files` has signed. Raises RequestError 403, 404."""
        record = await self._find(*parse_path(path))
        expected = "" if record is None else self._signature(record, signed.name, signed.expires)
        if record is None or not hmac.compare_digest(expected.encode(), signed.signature.encode()):
            raise RequestError("this download URL is not valid, or its checkpoint is gone: ask for new URLs", 403)
        if signed.expires <= self._clock():
            raise RequestError("this download URL has expired: ask for new URLs", 403)
        return Path(record.directory) / signed.name

    async def expire(self) -> None:
        """Deletes what has outlived its time to live; none of it was to be seen any more."""
        for checkpoint in await self._store.list_expired_checkpoints(self._clock()):
            logger.info("checkpoint %s has expired", checkpoint.tinker_path)
            await self.delete(checkpoint)

    def now(self) -> float:
        """What is expired at this time is not there, deleted or not."""
        return self._clock()

    async def _follow_moved_root(self, directories: Collection[str]) -> Collection[str]:
        """The state directory may lie elsewhere than when the rows were written. Answers the directories as of now."""
        places = {directory: str(self._root.joinpath(*Path(directory).parts[-3:])) for directory in directories}
        if moves := {old: new for old, new in places.items() if old != new}:
            await self._store.move_checkpoint_directories(moves)
        return places.values()

    async def _expire_in_time(self) -> None:
        while True:
            try:
                await self.expire()
            except SQLAlchemyError:  # a full disk, say: it may go better next time
                logger.exception("expired checkpoints could not be deleted")
            await asyncio.sleep(_EXPIRY_PERIOD_SECONDS)

    @asynccontextmanager
    async def _publishing(
        self,
        draft: CheckpointRecord,
        insert: Callable[[CheckpointRecord], Awaitable[None]],
        request_id: str | None = None,
    ) -> AsyncIterator[Path]:
        staging = Path(draft.directory).with_name(f"{_STAGING}{secrets.token_hex(8)}")
        await asyncio.to_thread(staging.mkdir, parents=True)
        try:
            yield staging
        except BaseException:
            await asyncio.to_thread(_remove, staging)
            raise
        await _to_the_end(self._publish(staging, draft, insert, request_id))

    async def _publish(
        self,
        staging: Path,
        draft: CheckpointRecord,
        insert: Callable[[CheckpointRecord], Awaitable[None]],
        request_id: str | None,
    ) -> None:
        try:
            size_bytes = await asyncio.to_thread(_seal_and_rename, staging, draft, request_id)
            await insert(replace(draft, size_bytes=size_bytes))
        except Exception as error:
            await asyncio.to_thread(_remove, staging, Path(draft.directory))
            if isinstance(error, IntegrityError):
                raise _taken(draft) from None
            raise

    def _draft(
        self,
        run: RunRecord,
        kind: CheckpointKind,
        name: str,
        ttl_seconds: int | None,
        user_metadata: dict[str, str] | None,
        has_optimizer: bool,
    ) -> CheckpointRecord:
        place = self._root / directory_name(run.run_id) / kind / f"{name}.{secrets.token_hex(4)}"
        return CheckpointRecord(
            run_id=run.run_id,
            tenant_id=run.tenant_id,
            kind=kind,
            name=name,
            directory=str(place),
            size_bytes=0,
            created_at=self._clock(),
            expires_at=self._expiry(ttl_seconds),
            public=False,
            user_metadata=user_metadata,
            base_model=run.base_model,
            lora=run.lora,
            has_optimizer=has_optimizer,
        )

    async def _require_free(self, draft: CheckpointRecord) -> None:
        if await self._find(draft.run_id, draft.kind, draft.name):
            raise _taken(draft)
        if expired := await self._store.get_checkpoint(draft.run_id, draft.kind, draft.name):
            await self.delete(expired)

    async def _find(self, run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None:
        record = await self._store.get_checkpoint(run_id, kind, name)
        if record is None or (record.expires_at is not None and record.expires_at <= self._clock()):
            return None
        return record

    async def _may_read(self, tenant: Tenant, record: CheckpointRecord, access_token: str | None) -> bool:
        if record.public or record.tenant_id == tenant.id:
            return True
        shown = await self._auth.tenant_of(access_token) if access_token else None
        return shown is not None and shown.id == record.tenant_id

    def _expiry(self, ttl_seconds: int | None) -> float | None:
        return None if ttl_seconds is None else self._clock() + ttl_seconds

    def _signature(self, checkpoint: CheckpointRecord, file: str, expires: int) -> str:
        """Holds for this version of the checkpoint alone: a directory is never used twice."""
        message = "\n".join((checkpoint.directory, file, str(expires)))
        return hmac.new(self._secret, message.encode(), "sha256").hexdigest()


@dataclass(frozen=True)
class SignedFile:
    """A file of a checkpoint, and what a download URL must carry to be answered without a key.

    name: relative to the checkpoint. expires: seconds since the epoch.
    """

    name: str
    expires: int
    signature: str


def check_name(name: str) -> str:
    """Raises OperationError (user)."""
    if not _NAME.fullmatch(name):
        raise OperationError(
            f"checkpoint name {name!r} is not allowed: use 1 to 128 of A-Z a-z 0-9 . _ - and no dot in front"
        )
    return name


def parse_path(path: str) -> tuple[str, CheckpointKind, str]:
    """Run id, kind, name. Raises RequestError 400."""
    match path.removeprefix("tinker://").split("/"):
        case [run_id, ("weights" | "sampler_weights" | "external_weights") as kind, name] if run_id and name:
            return run_id, kind, name
    raise RequestError(
        f"{path!r} is not a checkpoint path: tinker://RUN_ID/weights/NAME (or sampler_weights, external_weights)"
    )


def _missing(path: str) -> RequestError:
    return RequestError(f"there is no checkpoint {path}, or it is not yours to read", status=404)


def _taken(checkpoint: CheckpointRecord) -> OperationError:
    return OperationError(
        f"checkpoint {checkpoint.tinker_path} exists: choose another name, delete it first, or save with overwrite=True"
    )


async def _to_the_end(work: Coroutine[None, None, None]) -> None:
    """A caller that is cancelled learns of it after `work` is done: a row and its directory come and go together."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def directory_name(run_id: str) -> str:
    """Run ids are made of our session ids and numbers; a colon is not for every file system."""
    assert re.fullmatch(r"[A-Za-z0-9_-]+(:[A-Za-z0-9_-]+)*", run_id), run_id
    return run_id.replace(":", "_")


def _seal_and_rename(staging: Path, draft: CheckpointRecord, request_id: str | None) -> int:
    """Hashes the files, writes the manifest, makes all of it durable and renames; returns their bytes."""
    about = {
        "format": MANIFEST_FORMAT,
        "tinker_path": draft.tinker_path,
        "base_model": draft.base_model,
        "lora": draft.lora.model_dump(),
        "has_optimizer": draft.has_optimizer,
        "created_at": draft.created_at,
        "request_id": request_id,
    }
    size_bytes = seal(staging, about)
    staging.rename(draft.directory)
    sync_directory(staging.parent)
    return size_bytes


def _saved_by(directory: Path) -> str | None:
    return read_manifest(directory).get("request_id")


def _link_files(source: Path, target: Path) -> None:
    """Published files never change, so two checkpoints may share them."""
    for name in listed_files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:  # a file system without links
            shutil.copyfile(source / name, target / name)


def _remove(*directories: Path) -> None:
    """What cannot be removed now (a worker still writes into it) is swept at the next start."""
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(root: Path, runs: Collection[str], published: Collection[str]) -> None:
    """Runs that this database does not know are left alone: somebody may have put in another database."""
    for directory in root.glob("*/*/*"):
        if directory.name.startswith(_STAGING) or (
            directory.parent.parent.name in runs and str(directory) not in published
        ):
            logger.info("removing %s: it was never published, or was deleted", directory)
            _remove(directory)


def _load_secret(file: Path) -> bytes:
    """Made once, readable by this user alone: URLs handed out stay valid over a restart."""
    if not file.exists():
        new = file.with_suffix(".new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
            handle.write(secrets.token_bytes(_SECRET_BYTES))
        new.rename(file)
    secret = file.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise ValueError(f"{file} is damaged: delete it (download URLs handed out before become invalid)")
    return secret

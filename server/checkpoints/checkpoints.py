"""Manages checkpoints: names, publication, expiry, copies and access rights.

A checkpoint exists only with its row; directories without one are swept at start. So a torn checkpoint is never listed,
and one that is overwritten is either the old or the new one. CheckpointFiles stores the files, CheckpointMirrors the
copies.
"""

import asyncio
import hmac
import logging
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from ...schemas.errors import OperationError, RequestError
from ...schemas.models import TrainingConfig, training_of
from ...workers.protocol.calls import WorkerLost
from ..files.directories import directory_name
from ..files.manifest import read_manifest
from ..files.object_store import ObjectStore, ObjectStoreError
from ..files.storage_config import CheckpointStorageConfig
from ..logs.repeated_errors import RepeatedErrorLog
from ..store import (
    CheckpointCopyRecord,
    CheckpointKind,
    CheckpointRecord,
    DatabaseUnreachable,
    RunRecord,
    SessionRecord,
    Store,
    TenantRecord,
)
from ..tenants.auth import Auth, Tenant
from .checkpoint_files import CLOSING_SECONDS, CheckpointFiles, link_files
from .mirror import CheckpointMirrors

logger = logging.getLogger(__name__)

MANIFEST_FORMAT = 1
URL_LIFETIME_SECONDS = 3600
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_EXPIRY_PERIOD_SECONDS = 10.0
_SECRET_BYTES = 32


class Checkpoints:
    """The checkpoints of all tenants. The owner may do everything. Public ones can be read by every tenant, others also
    by a caller that presents the owner's key as access token.
    """

    def __init__(
        self,
        store: Store,
        auth: Auth,
        state_dir: Path,
        clock: Callable[[], float] = time.time,
        config: CheckpointStorageConfig = CheckpointStorageConfig(),  # noqa: B008
    ) -> None:
        self._store = store
        self._auth = auth
        self._places = ObjectStore(config.retry_pauses_seconds, config.mirrors)
        self._mirror = CheckpointMirrors(store, self._places, config)
        self._files = CheckpointFiles(state_dir, config, self._places, self._mirror.complete_copies)
        self._secret_file = state_dir / "url_secret"
        self._secret = b""
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Sweeps what a crash left behind and starts the background tasks, such as deleting expired checkpoints."""
        self._secret = await asyncio.to_thread(_load_secret, self._secret_file)
        # Listed before the rows are read: a checkpoint published in between must not look like one without a row.
        found = await self._files.found()
        published = await self._follow_moved_root(await self._store.checkpoints.list_directories())
        published |= await self._restore_lost_rows(await self._files.find_without_row(found, published))
        runs = {directory_name(run_id) for run_id in await self._store.runs.list_ids()}
        await self._files.sweep(found, runs, published)
        await self._mirror.start(self._files, published)
        self._tasks = [asyncio.create_task(self._expire_periodically()), asyncio.create_task(self._sweep_url(runs))]

    def schedule_transfer_cancellation(self) -> None:
        """Cancels transfers to and from URLs, and those that wait for them, CLOSING_SECONDS from now.

        Used at the end of a process; the next one resumes unfinished work.
        """
        asyncio.get_running_loop().call_later(CLOSING_SECONDS, self._places.close)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, self._mirror.close(), self._files.close(), return_exceptions=True)
        self._places.close()

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
        """Yields an empty directory to write into. Leaving the block publishes it; an exception discards it.

        Args:
            run: must be in the store.
            request_id: of the save, for `was_saved`.
        Raises:
            OperationError: (user) the name is not allowed, or in use without `overwrite`; (server) it could not be
                saved.
        """
        draft = self._draft(run, kind, check_name(name), ttl_seconds, user_metadata, has_optimizer)
        if not overwrite:
            await self._require_free(draft)

        async with self._files.staging(draft.directory) as staging:
            yield staging
            about = await self._manifest_entries(draft, request_id)
            bring = partial(self._files.publish, staging, draft.directory, about)
            await _shielded(self._publish(draft, bring, partial(self._insert_or_replace, overwrite)))

    async def was_saved(self, run: RunRecord, kind: CheckpointKind, name: str, request_id: str) -> bool:
        """True if this very save published the checkpoint before a crash lost its response.

        Raises:
            OperationError: (server) the manifest cannot be read.
        """
        record = await self._find(run.run_id, kind, name)
        return record is not None and (await self._manifest(record)).get("request_id") == request_id

    @asynccontextmanager
    async def reading(self, checkpoint: CheckpointRecord) -> AsyncIterator[Path]:
        """Yields a local directory with the checkpoint's verified files, kept while the block runs.

        Entering raises OperationError (server) if the files and all copies are lost or damaged.
        """
        async with AsyncExitStack() as held:
            async with self._hiding_paths(checkpoint):
                here = await held.enter_async_context(self._files.reading(checkpoint.directory))
            yield here

    async def copies(self, checkpoints: Collection[CheckpointRecord]) -> Mapping[str, list[CheckpointCopyRecord]]:
        """Returns directory -> its copies at mirrors."""
        found: dict[str, list[CheckpointCopyRecord]] = defaultdict(list)
        for copy in await self._store.copies.list_in([checkpoint.directory for checkpoint in checkpoints]):
            found[copy.directory].append(copy)
        return found

    async def resolve(self, tenant: Tenant, path: str, access_token: str | None = None) -> CheckpointRecord:
        """Returns a checkpoint that the tenant may read.

        Raises:
            RequestError: 400 if `path` is not a checkpoint path, 404 if it does not exist or may not be read.
        """
        return await self.resolve_for(path, {tenant.id, await self.reader_id(access_token)})

    async def reader_id(self, access_token: str | None) -> str | None:
        """Returns the id of the tenant whose key this is, or None."""
        shown = await self._auth.tenant_of(access_token) if access_token else None
        return None if shown is None else shown.id

    async def resolve_for(self, path: str, readers: Collection[str | None]) -> CheckpointRecord:
        """Like `resolve`, for a caller that may read the checkpoints of the tenants with these ids."""
        record = await self._find(*parse_path(path))
        if record is None or not (record.public or record.tenant_id in readers):
            raise _not_found_error(path)
        return record

    async def find(self, path: str) -> CheckpointRecord | None:
        """Returns the checkpoint without an access check, for a caller that passed it before."""
        return await self._find(*parse_path(path))

    async def resolve_owned(self, tenant: Tenant, run_id: str, checkpoint_id: str) -> CheckpointRecord:
        """Returns a checkpoint that the tenant may change.

        Args:
            checkpoint_id: KIND/NAME.
        Raises:
            RequestError: 400 and 404 as in `resolve`, 403 for a public checkpoint of another tenant.
        """
        path = f"tinker://{run_id}/{checkpoint_id}"
        record = await self.resolve(tenant, path)
        if record.tenant_id != tenant.id:
            raise RequestError(f"checkpoint {path} belongs to another tenant: it can be read, not changed", status=403)
        return record

    async def delete(self, checkpoint: CheckpointRecord) -> None:
        """Deletes the checkpoint. Its copies at mirrors are deleted later, in the background."""
        await self._files.mark_deleted(checkpoint.directory)
        async with self._mirror.deleting(checkpoint.directory):
            await self._store.checkpoints.delete(checkpoint)
        await self._files.remove(checkpoint.directory)

    async def set_public(self, checkpoint: CheckpointRecord, public: bool) -> None:
        await self._store.checkpoints.set_public(checkpoint, public)

    async def set_ttl(self, checkpoint: CheckpointRecord, ttl_seconds: int | None) -> None:
        """Sets when the checkpoint expires, counted from now; None means never."""
        await self._store.checkpoints.set_expiry(checkpoint, self._expiry(ttl_seconds))

    async def copy(self, source: CheckpointRecord, to: SessionRecord, ttl_seconds: int | None) -> CheckpointRecord:
        """Copies the checkpoint into a new run that cannot be trained.

        The files are shared with the source if the file system supports it. A repeated idempotency key of the same
        tenant returns the same copy.

        Args:
            to: session of the new run; already ended, and not yet in the store.
        Raises:
            RequestError: 503 if the source cannot be read or the copy cannot be written.
        """
        if known := await self._store.checkpoints.find_copied(to):
            return known
        now = self._clock()
        run = RunRecord(
            run_id=f"{to.session_id}:train:0",
            session_id=to.session_id,
            tenant_id=to.tenant_id,
            base_model=source.base_model,
            training=source.training,
            role=source.role,
            target_path=source.target_path,
            created_at=now,
            last_request_at=now,
            user_metadata={"copied_from": source.tinker_path},
        )
        draft = self._draft(run, source.kind, source.name, ttl_seconds, source.user_metadata, source.has_optimizer)
        with _as_request_errors():
            await self._copy(source, draft, partial(self._store.checkpoints.insert_copied, to, run))
        return await self.resolve(Tenant(to.tenant_id, ""), draft.tinker_path)

    async def create(
        self,
        run: RunRecord,
        session: SessionRecord,
        name: str,
        ttl_seconds: int | None,
        write: Callable[[Path], Awaitable[TrainingConfig]],
    ) -> CheckpointRecord:
        """Creates a checkpoint, without optimizer state, of a new run that cannot be trained. Idempotent like `copy`.

        Args:
            run: not yet in the store.
            session: already ended, and not yet in the store.
            write: fills an empty directory and returns the training configuration of its content.
        Raises:
            OperationError: the name is not allowed, the checkpoint could not be saved, or `write` raised it.
        """
        if known := await self._store.checkpoints.find_copied(session):
            return known
        draft = self._draft(run, "weights", check_name(name), ttl_seconds, None, has_optimizer=False)
        new_run, staging = self._files.marking_new_run(draft.directory), self._files.staging(draft.directory)
        async with new_run, staging as staging:
            try:
                training = await write(staging)
            except OperationError:
                await self._files.discard_new_run(draft.directory)
                raise
            draft, run = replace(draft, training=training), replace(run, training=training)
            bring = partial(self._files.publish, staging, draft.directory, await self._manifest_entries(draft))
            await _shielded(self._publish(draft, bring, partial(self._store.checkpoints.insert_copied, session, run)))
        return await self.resolve(Tenant(session.tenant_id, ""), draft.tinker_path)

    async def sign_files(self, checkpoint: CheckpointRecord) -> "list[SignedFile]":
        """Returns the files with signatures that allow downloads without a key for URL_LIFETIME_SECONDS.

        Raises:
            RequestError: 503 if the manifest cannot be read.
        """
        expires = int(self._clock()) + URL_LIFETIME_SECONDS
        with _as_request_errors():
            files = (await self._manifest(checkpoint))["files"]
        return [SignedFile(file, expires, self._signature(checkpoint, file, expires)) for file in files]

    async def signed_file(self, path: str, signed: "SignedFile") -> Path:
        """Returns the local path of a file that `sign_files` signed. Open it at once: a cached one may be evicted.

        Raises:
            RequestError: 403 if the signature is wrong or expired, 503 if the file cannot be read.
        """
        record = await self._find(*parse_path(path))
        expected = "" if record is None else self._signature(record, signed.name, signed.expires)
        if record is None or not hmac.compare_digest(expected.encode(), signed.signature.encode()):
            raise RequestError("this download URL is not valid, or its checkpoint was deleted: request a new URL", 403)
        if signed.expires <= self._clock():
            raise RequestError("this download URL has expired: request a new URL", 403)
        with _as_request_errors():
            async with self._hiding_paths(record):
                return await self._files.file(record.directory, signed.name)

    async def _manifest(self, checkpoint: CheckpointRecord) -> Mapping[str, Any]:
        async with self._hiding_paths(checkpoint):
            return await self._files.manifest(checkpoint.directory)

    @asynccontextmanager
    async def _hiding_paths(self, checkpoint: CheckpointRecord) -> AsyncIterator[None]:
        """Replaces the message of an OperationError by one that names no local path; the original goes to the log."""
        try:
            yield
        except OperationError as error:
            now = await self._store.checkpoints.get(checkpoint.run_id, checkpoint.kind, checkpoint.name)
            if now is None or now.directory != checkpoint.directory:
                words = f"{checkpoint.tinker_path} was deleted or replaced while it was read: send the request again"
                raise OperationError(words, "user") from None
            logger.error("%s: %s", checkpoint.tinker_path, error)
            raise OperationError(
                f"{checkpoint.tinker_path} cannot be read: its files are lost, damaged or out of reach, and the "
                "server's log says why",
                "server",
            ) from None

    async def expire(self) -> None:
        """Deletes expired checkpoints. Readers no longer see them even before that."""
        for checkpoint in await self._store.checkpoints.list_expired(self._clock()):
            logger.info("checkpoint %s has expired", checkpoint.tinker_path)
            await self.delete(checkpoint)

    def now(self) -> float:
        """Returns the time that decides expiry: what has expired by then is hidden, deleted or not."""
        return self._clock()

    async def _restore_lost_rows(self, unlisted: Sequence[Path]) -> Set[str]:
        """Restores lost rows and returns the directories of those checkpoints.

        Only for manifests that name their tenant: versions that did not write it did not mark deleted checkpoints
        either.
        """
        taken = set()
        for directory in unlisted:
            about = await asyncio.to_thread(read_manifest, directory)
            path = await path_of_lost_row(self._store, str(directory), about, self._files.is_ours_alone(directory))
            if path is not None and "tenant_id" in about:
                await restore_row(self._store, str(directory), about)
                logger.warning("the database had lost %s, which is in %s: its row is restored", path, directory)
                taken.add(str(directory))
        return taken

    async def _follow_moved_root(self, directories: Collection[str]) -> Set[str]:
        """Updates the rows if the state directory has moved since they were written. Returns the current
        directories.
        """
        moves = await self._files.follow_moved_root(directories)
        await self._mirror.move_directories(moves)
        if moves:
            await self._store.checkpoints.move_directories(moves)
        return {moves.get(directory, directory) for directory in directories}

    async def _sweep_url(self, runs: Collection[str]) -> None:
        try:
            await self._files.sweep_url(runs, self._store.checkpoints.list_directories)
        except ObjectStoreError as error:
            logger.warning("could not look for unfinished uploads that a crash may have left: %s", error)

    async def _expire_periodically(self) -> None:
        trouble = RepeatedErrorLog(logger, "deleting expired checkpoints")
        while True:
            try:
                await self.expire()
            except SQLAlchemyError as error:  # possibly temporary, such as a full disk
                trouble.failed(error)
            else:
                trouble.succeeded()
            await asyncio.sleep(_EXPIRY_PERIOD_SECONDS)

    async def _copy(
        self,
        source: CheckpointRecord,
        draft: CheckpointRecord,
        insert: Callable[[CheckpointRecord], Awaitable[None]],
    ) -> None:
        about = await self._manifest_entries(draft)
        if self._files.can_copy_remotely(source.directory, draft.directory):
            bring = partial(self._files.copy_remotely, source.directory, draft.directory, about)
            await _shielded(self._publish(draft, bring, insert))
            return
        new_run, staging = self._files.marking_new_run(draft.directory), self._files.staging(draft.directory)
        async with new_run, staging as staging, self.reading(source) as files:
            await asyncio.to_thread(link_files, files, staging)
            bring = partial(self._files.publish, staging, draft.directory, about)
            await _shielded(self._publish(draft, bring, insert))

    async def _insert_or_replace(self, overwrite: bool, record: CheckpointRecord) -> None:
        """Inserts the row, replacing a checkpoint of the same name if `overwrite`."""
        known = await self._store.checkpoints.get(record.run_id, record.kind, record.name) if overwrite else None
        if known is not None:
            await self._files.mark_deleted(known.directory)
        async with self._mirror.deleting(known.directory) if known else nullcontext():
            replaced = await self._store.checkpoints.put(record, overwrite)
        if replaced is not None:
            await self._files.remove(replaced.directory)

    async def _publish(
        self,
        draft: CheckpointRecord,
        move_files: Callable[[], Awaitable[int]],
        insert: Callable[[CheckpointRecord], Awaitable[None]],
    ) -> None:
        """Brings the files into place, then inserts the row; removes the files if that fails.

        Args:
            move_files: moves the files to the draft's directory and returns their bytes.
        """
        try:
            record = replace(draft, size_bytes=await move_files())
            await insert(record)
        except (ObjectStoreError, OSError) as error:
            await self._files.remove(draft.directory)
            raise OperationError(f"checkpoint {draft.tinker_path} could not be saved: {error}", "server") from error
        except IntegrityError:
            await self._files.remove(draft.directory)
            raise _name_in_use_error(draft) from None
        except DatabaseUnreachable:
            raise  # the row may have been committed; if not, the files are swept
        except Exception:
            await self._files.remove(draft.directory)
            raise
        await self._mirror.add(record.directory)

    def _draft(
        self,
        run: RunRecord,
        kind: CheckpointKind,
        name: str,
        ttl_seconds: int | None,
        user_metadata: dict[str, str] | None,
        has_optimizer: bool,
    ) -> CheckpointRecord:
        return CheckpointRecord(
            run_id=run.run_id,
            tenant_id=run.tenant_id,
            kind=kind,
            name=name,
            directory=self._files.directory(directory_name(run.run_id), kind, name),
            size_bytes=0,
            created_at=self._clock(),
            expires_at=self._expiry(ttl_seconds),
            public=False,
            user_metadata=user_metadata,
            base_model=run.base_model,
            training=run.training,
            role=run.role,
            target_path=run.target_path,
            has_optimizer=has_optimizer,
        )

    async def _manifest_entries(self, draft: CheckpointRecord, request_id: str | None = None) -> Mapping[str, object]:
        """Returns what the manifest records in addition to the files: the content of the row, in case the row is
        lost.
        """
        tenant = await self._store.tenants.get(draft.tenant_id)
        return {
            "format": MANIFEST_FORMAT,
            "tinker_path": draft.tinker_path,
            "tenant_id": draft.tenant_id,
            "tenant_name": draft.tenant_id if tenant is None else tenant.name,
            "base_model": draft.base_model,
            "training": draft.training.model_dump(),
            "role": draft.role,
            "target_path": draft.target_path,
            "has_optimizer": draft.has_optimizer,
            "user_metadata": draft.user_metadata,
            "created_at": draft.created_at,
            "expires_at": draft.expires_at,
            "request_id": request_id,
        }

    async def _require_free(self, draft: CheckpointRecord) -> None:
        if await self._find(draft.run_id, draft.kind, draft.name):
            raise _name_in_use_error(draft)
        if expired := await self._store.checkpoints.get(draft.run_id, draft.kind, draft.name):
            await self.delete(expired)

    async def _find(self, run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None:
        record = await self._store.checkpoints.get(run_id, kind, name)
        if record is None or (record.expires_at is not None and record.expires_at <= self._clock()):
            return None
        return record

    def _expiry(self, ttl_seconds: int | None) -> float | None:
        return None if ttl_seconds is None else self._clock() + ttl_seconds

    def _signature(self, checkpoint: CheckpointRecord, file: str, expires: int) -> str:
        """Signs a file of this version of the checkpoint only, since a directory is never reused."""
        message = "\n".join((checkpoint.directory, file, str(expires)))
        return hmac.new(self._secret, message.encode(), "sha256").hexdigest()


@dataclass(frozen=True)
class SignedFile:
    """A file of a checkpoint, with what a download URL must carry to be served without a key.

    name: relative to the checkpoint.
    expires: seconds since the epoch.
    """

    name: str
    expires: int
    signature: str


def check_name(name: str) -> str:
    """Returns the name. Raises OperationError (user) if it is not allowed."""
    if not _NAME.fullmatch(name):
        raise OperationError(
            f"checkpoint name {name!r} is not allowed: use 1 to 128 of A-Z a-z 0-9 . _ - without a leading dot"
        )
    return name


def parse_path(path: str) -> tuple[str, CheckpointKind, str]:
    """Returns run id, kind and name. Raises RequestError 400 if `path` is not a checkpoint path."""
    match path.removeprefix("tinker://").split("/"):
        case [run_id, ("weights" | "sampler_weights" | "external_weights") as kind, name] if run_id and name:
            return run_id, kind, name
    raise RequestError(
        f"{path!r} is not a checkpoint path: tinker://RUN_ID/weights/NAME (or sampler_weights, external_weights)"
    )


def full_path(path: str) -> str:
    """Adds the scheme tinker://, which callers may leave out."""
    return f"tinker://{path.removeprefix('tinker://')}"


def _not_found_error(path: str) -> RequestError:
    return RequestError(f"there is no checkpoint {path}, or it is not yours to read", status=404)


def _name_in_use_error(checkpoint: CheckpointRecord) -> OperationError:
    return OperationError(
        f"checkpoint {checkpoint.tinker_path} exists: choose another name, delete it first, or save with overwrite=True"
    )


@contextmanager
def hiding_directory_as(name: str, directory: Path) -> Iterator[None]:
    """Rewrites errors of workers that load files: the tenant sees the name it used, and only the log has the
    directory.
    """
    try:
        yield
    except WorkerLost:
        raise
    except OperationError as error:
        logger.warning("%s, which is in %s, cannot be loaded: %s", name, directory, error.message)
        reason = error.message.replace(str(directory), "its directory")
        raise OperationError(f"{name} cannot be loaded: {reason}", error.category) from None


@contextmanager
def _as_request_errors() -> Iterator[None]:
    """Turns OperationError into RequestError: 409 for the user's errors, 503 for the server's."""
    try:
        yield
    except OperationError as error:
        raise RequestError(error.message, 409 if error.category == "user" else 503) from error


async def _shielded(work: Coroutine[None, None, None]) -> None:
    """Runs `work` to its end even if the caller is cancelled, and only then raises CancelledError.

    `work` needs what the caller has made, and a row and its directory must be created and removed together.
    """
    task, is_cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled and not task.cancelled():
        logger.info("a save was cancelled while publishing; its outcome: %s", task.exception() or "published")
        raise asyncio.CancelledError
    task.result()


async def path_of_lost_row(store: Store, directory: str, about: Mapping[str, Any], is_ours_alone: bool) -> str | None:
    """Returns the path of a complete checkpoint whose row the database has lost, so that `restore_row` can restore it.

    None if the manifest does not name the owner, if the name is in use, or if the run is unknown and other servers use
    the same place.

    Args:
        directory: a path or a URL.
        about: the manifest.
        is_ours_alone: no other server uses the place.
    """
    try:
        run_id, kind, name = parse_path(about["tinker_path"])
        training_of(about["training"] if "training" in about else about["lora"])
    except (RequestError, KeyError, AttributeError, ValueError):
        return None
    is_elsewhere = run_id.replace(":", "_") != PurePosixPath(directory).parts[-3]
    if is_elsewhere or await store.checkpoints.get(run_id, kind, name):
        return None
    is_known = await store.runs.get(run_id) is not None or (is_ours_alone and "tenant_id" in about)
    return about["tinker_path"] if is_known else None


async def restore_row(store: Store, directory: str, about: Mapping[str, Any]) -> str:
    """Restores the row of a checkpoint that has a `path_of_lost_row`, and the rows it depends on. Returns that path.

    The manifest does not record whether it was public, so it is private now.
    """
    run_id, kind, name = parse_path(about["tinker_path"])
    run = await store.runs.get(run_id) or await _restore_run_row(store, run_id, about)
    record = CheckpointRecord(
        run_id=run_id,
        tenant_id=run.tenant_id,
        kind=kind,
        name=name,
        directory=directory,
        size_bytes=sum(listed["size_bytes"] for listed in about["files"].values()),
        created_at=about["created_at"],
        expires_at=about.get("expires_at"),
        public=False,
        user_metadata=about.get("user_metadata"),
        base_model=about["base_model"],
        training=run.training,
        has_optimizer=about["has_optimizer"],
        role=run.role,
        target_path=about.get("target_path"),
    )
    await store.checkpoints.put(record, overwrite=False)
    return record.tinker_path


async def _restore_run_row(store: Store, run_id: str, about: Mapping[str, Any]) -> RunRecord:
    """Restores a run that can no longer be trained, with its session and its tenant."""
    created_at = about["created_at"]
    named = TenantRecord(about["tenant_id"], about["tenant_name"], created_at)
    tenant = await store.tenants.get(named.tenant_id) or await store.tenants.find(named.name)
    if tenant is None:
        await store.tenants.ensure(tenant := named)
    session_id = run_id.partition(":")[0]
    if await store.sessions.get(session_id) is None:
        ended = {"finished_at": created_at, "end": "interrupted", "end_detail": "the database had lost it"}
        await store.sessions.insert(SessionRecord(session_id, tenant.tenant_id, created_at, created_at, **ended))
    training, role, target_path = training_of(about["training"]), about["role"], about["target_path"]
    run = RunRecord(
        *(run_id, session_id, tenant.tenant_id, about["base_model"], training, created_at, created_at),
        role=role,
        target_path=target_path,
    )
    await store.runs.insert(run)
    return run


def _load_secret(file: Path) -> bytes:
    """Returns the key that signs URLs. It is created once, readable by this user only, so URLs stay valid over
    restarts.
    """
    if not file.exists():
        new = file.with_suffix(".new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
            handle.write(secrets.token_bytes(_SECRET_BYTES))
        new.rename(file)
    secret = file.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise ValueError(f"{file} is damaged: delete it (download URLs issued before become invalid)")
    return secret

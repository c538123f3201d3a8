"""Manages checkpoints: names, publication, expiry, copies and access rights.

A checkpoint exists only with its row; directories without one are swept at start. So a torn checkpoint is never listed,
and one that is overwritten is either the old or the new one. CheckpointFiles stores the files, CheckpointMirrors the
copies.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ...schemas.errors import OperationError, RequestError
from ...schemas.models import Limit
from ...workers.protocol.calls import WorkerLost
from ..files.directories import directory_name
from ..files.object_store import ObjectStore
from ..files.storage_config import CheckpointStorageConfig
from ..store import CheckpointCopyRecord, CheckpointKind, CheckpointRecord, RunRecord, Store
from ..tenants.auth import Auth, Tenant
from .archive import Archives
from .checkpoint_files import CLOSING_SECONDS, CheckpointFiles
from .checkpoint_paths import check_name, parse_path
from .download_urls import UrlSigner, load_secret
from .mirror import CheckpointMirrors
from .publication import CheckpointPublication, name_in_use_error
from .upkeep import CheckpointUpkeep

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of all tenants. The owner may do everything. Every tenant can read public ones; a caller that
    presents the owner's key as access token can read the others, too."""

    def __init__(
        self,
        store: Store,
        auth: Auth,
        state_dir: Path,
        clock: Callable[[], float] = time.time,
        config: CheckpointStorageConfig = CheckpointStorageConfig(),  # noqa: B008
    ) -> None:
        self.store = store
        self._auth = auth
        self._config = config
        self._object_store = ObjectStore(config.retry_pauses_seconds, config.mirrors)
        self._mirror = CheckpointMirrors(store, self._object_store, config)
        self.files = CheckpointFiles(state_dir, config, self._object_store, self._mirror.complete_copies)
        self.archives = Archives(self.files)
        self.publication = CheckpointPublication(store, self.files, self._mirror, config)
        self._secret_file = state_dir / "url_secret"
        self.signer = UrlSigner(b"")
        self._clock = clock
        self._upkeep = CheckpointUpkeep(store, self.files, self._mirror, self.expire)

    async def start(self) -> None:
        """Sweeps what a crash left behind and starts the background tasks, such as deleting expired checkpoints."""
        self.signer = UrlSigner(await asyncio.to_thread(load_secret, self._secret_file))
        await self._upkeep.start()

    def schedule_transfer_cancellation(self) -> None:
        """Cancels transfers to and from URLs, CLOSING_SECONDS from now; the next process resumes unfinished work."""
        asyncio.get_running_loop().call_later(CLOSING_SECONDS, self._object_store.close)

    async def close(self) -> None:
        await asyncio.gather(self._upkeep.close(), self._mirror.close(), self.files.close(), return_exceptions=True)
        self._object_store.close()

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
        """Yields an empty directory to write into; leaving the block publishes it, an exception discards it. Raises
        OperationError: (user) the name is not allowed, or in use without `overwrite`; (server) it could not be saved.
        `request_id` names the save, for `was_saved`."""
        checkpoint = self.new_checkpoint(run, kind, check_name(name), ttl_seconds, user_metadata, has_optimizer)
        if not overwrite:
            await self._require_free(checkpoint)
        await self.publication.require_room(checkpoint)

        async with self.files.staging(checkpoint.directory) as staging:
            yield staging
            move = partial(self.files.publish, staging, checkpoint.directory)
            insert = partial(self.publication.insert_or_replace, overwrite)
            await self.publication.publish(checkpoint, move, insert, request_id)

    async def was_saved(self, run: RunRecord, kind: CheckpointKind, name: str, request_id: str) -> bool:
        """True if this very save published the checkpoint before a crash lost its response. Raises OperationError."""
        record = await self._find(run.run_id, kind, name)
        return record is not None and (await self.manifest(record)).get("request_id") == request_id

    @asynccontextmanager
    async def reading(self, checkpoint: CheckpointRecord) -> AsyncIterator[Path]:
        """Yields a local directory with the checkpoint's verified files, kept while the block runs.

        Entering raises OperationError (server) if the files and all copies are lost or damaged.
        """
        async with AsyncExitStack() as held:
            async with self.hiding_paths(checkpoint):
                here = await held.enter_async_context(self.files.reading(checkpoint.directory))
            yield here

    async def limits(self, tenant_id: str) -> dict[str, Limit]:
        """Returns those fields of Limits that concern the tenant's checkpoints."""
        num, num_bytes = await self.store.checkpoints.stock_of_tenant(tenant_id, self._clock())
        return {
            "checkpoints": Limit(limit=self._config.tenant_checkpoints, used=num),
            "checkpoint_bytes": Limit(limit=self._config.tenant_checkpoint_bytes, used=num_bytes),
        }

    async def copies(self, checkpoints: Collection[CheckpointRecord]) -> Mapping[str, list[CheckpointCopyRecord]]:
        """Returns directory -> its copies at mirrors."""
        found: dict[str, list[CheckpointCopyRecord]] = defaultdict(list)
        for copy in await self.store.copies.list_in([checkpoint.directory for checkpoint in checkpoints]):
            found[copy.directory].append(copy)
        return found

    async def resolve(self, tenant: Tenant, path: str, access_token: str | None = None) -> CheckpointRecord:
        """Returns a checkpoint that the tenant may read. Raises RequestError: 400 if `path` is not a checkpoint path,
        404 if it does not exist or may not be read."""
        return await self.resolve_for(path, {tenant.id, await self.reader_id(access_token)})

    async def reader_id(self, access_token: str | None) -> str | None:
        shown = await self._auth.tenant_of(access_token) if access_token else None
        return None if shown is None else shown.id

    async def resolve_for(self, path: str, readers: Collection[str | None]) -> CheckpointRecord:
        """Like `resolve`, for a caller that may read the checkpoints of the tenants with these ids."""
        record = await self._find(*parse_path(path))
        if record is None or not (record.public or record.tenant_id in readers):
            raise RequestError(
                f"there is no checkpoint {path}, or it is not yours to read: another API key may own it", status=404
            )
        return record

    async def find(self, path: str) -> CheckpointRecord | None:
        """Returns the checkpoint without an access check, for a caller that passed it before."""
        return await self._find(*parse_path(path))

    async def resolve_owned(self, tenant: Tenant, path: str) -> CheckpointRecord:
        """Returns a checkpoint that the tenant may change. Raises RequestError: 400 and 404 as in `resolve`, 403 for a
        public checkpoint of another tenant."""
        record = await self.resolve(tenant, path)
        if record.tenant_id != tenant.id:
            raise RequestError(f"checkpoint {path} belongs to another tenant: it can be read, not changed", status=403)
        return record

    async def delete(self, checkpoint: CheckpointRecord) -> None:
        """Deletes the checkpoint. Its copies at mirrors are deleted later, in the background."""
        await self.files.mark_deleted(checkpoint.directory)
        async with self._mirror.deleting(checkpoint.directory):
            await self.store.checkpoints.delete(checkpoint)
        await self.files.remove(checkpoint.directory)

    async def set_public(self, checkpoint: CheckpointRecord, public: bool) -> None:
        await self.store.checkpoints.set_public(checkpoint, public)

    async def set_ttl(self, checkpoint: CheckpointRecord, ttl_seconds: int | None) -> None:
        """Sets when the checkpoint expires, counted from now; None means never."""
        await self.store.checkpoints.set_expiry(checkpoint, self._expiry(ttl_seconds))

    async def manifest(self, checkpoint: CheckpointRecord) -> Mapping[str, Any]:
        async with self.hiding_paths(checkpoint):
            return await self.files.manifest(checkpoint.directory)

    @asynccontextmanager
    async def hiding_paths(self, checkpoint: CheckpointRecord) -> AsyncIterator[None]:
        """Replaces the message of an OperationError by one that names no local path; the original goes to the log."""
        try:
            yield
        except OperationError as error:
            now = await self.store.checkpoints.get(checkpoint.run_id, checkpoint.kind, checkpoint.name)
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
        for checkpoint in await self.store.checkpoints.list_expired(self._clock()):
            logger.info("checkpoint %s has expired", checkpoint.tinker_path)
            await self.delete(checkpoint)

    def now(self) -> float:
        """Returns the time that decides expiry: what has expired by then is hidden, deleted or not."""
        return self._clock()

    def new_checkpoint(
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
            directory=self.files.directory(directory_name(run.run_id), kind, name),
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

    async def _require_free(self, checkpoint: CheckpointRecord) -> None:
        if await self._find(checkpoint.run_id, checkpoint.kind, checkpoint.name):
            raise name_in_use_error(checkpoint)
        if expired := await self.store.checkpoints.get(checkpoint.run_id, checkpoint.kind, checkpoint.name):
            await self.delete(expired)

    async def _find(self, run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None:
        record = await self.store.checkpoints.get(run_id, kind, name)
        if record is None or (record.expires_at is not None and record.expires_at <= self._clock()):
            return None
        return record

    def _expiry(self, ttl_seconds: int | None) -> float | None:
        return None if ttl_seconds is None else self._clock() + ttl_seconds


@contextmanager
def hiding_directory_as(name: str, directory: Path) -> Iterator[None]:
    """Replaces paths in workers' load errors by the tenant's name of the checkpoint; only the log has them."""
    try:
        yield
    except WorkerLost:
        raise
    except OperationError as error:
        logger.warning("%s, which is in %s, cannot be loaded: %s", name, directory, error.message)
        reason = error.message.replace(str(directory), "its directory")
        raise OperationError(f"{name} cannot be loaded: {reason}", error.category) from None


@contextmanager
def as_request_errors() -> Iterator[None]:
    """Turns OperationError into RequestError: 409 for the user's errors, 503 for the server's."""
    try:
        yield
    except OperationError as error:
        raise RequestError(error.message, 409 if error.category == "user" else 503) from error

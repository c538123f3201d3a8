"""Loads draft models for speculative sampling into the workers.

A draft is loaded at the first request that needs it, once for all samplers that name it, and again after a worker
crash. It is dropped when no sampler names it and no request has used it for DROP_AFTER_SECONDS.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ...schemas.errors import OperationError, RequestError
from ...schemas.sampling import SampleRequest
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.calls import WorkerLost
from ...workers.protocol.plugins import plugin_rows
from ..checkpoints.checkpoints import Checkpoints, hiding_directory_as
from ..journal.strikes import Strikes
from ..store import CheckpointRecord
from ..tenants.auth import Tenant
from .sampler import Sampler

logger = logging.getLogger(__name__)

DROP_AFTER_SECONDS = 600.0


@dataclass(eq=False)
class _LoadedDraft:
    """A draft that is loaded, being loaded or being dropped.

    sampler_ids: samplers whose default draft this is. num_users: requests that load it or sample with it.
    changing: held during a load or a drop. dropping: timer that drops the draft after it was unused for long enough.
    """

    checkpoint: CheckpointRecord
    sampler_ids: set[str] = field(default_factory=set)
    num_users: int = 0
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    dropping: asyncio.TimerHandle | None = None

    @property
    def is_needed(self) -> bool:
        return bool(self.num_users or self.sampler_ids)


class DraftNotFound(RequestError):
    """Raised if the draft of a request or of a sampler does not exist, or does not fit the base model."""


class DraftNotLoaded(OperationError):
    """Raised if a draft's files cannot be loaded."""


class DraftLoader:
    """Owns the loaded drafts of all tenants; tenants that can read the same checkpoint share its draft."""

    def __init__(
        self, dispatch: WorkerDispatch, checkpoints: Checkpoints, unused_seconds: float = DROP_AFTER_SECONDS
    ) -> None:
        self._dispatch = dispatch
        self._checkpoints = checkpoints
        self._unused_seconds = unused_seconds
        self._held: dict[str, _LoadedDraft] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for held in self._held.values():
            _cancel_drop(held)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def find(self, tenant_id: str, path: str, base_model: str) -> CheckpointRecord:
        """Returns the checkpoint of a draft for this base model.

        Raises:
            DraftNotFound: 404 if the checkpoint does not exist or the tenant cannot read it, 400 if it is no draft of
            this base model.
        """
        try:
            checkpoint = await self._checkpoints.resolve(Tenant(tenant_id, ""), path)
        except RequestError as error:
            raise DraftNotFound(error.message, error.status) from None
        if checkpoint.role != "draft":
            raise DraftNotFound(
                f"{checkpoint.tinker_path} was saved by a {checkpoint.role}, which cannot draft tokens: set draft_path "
                "to a checkpoint of a draft"
            )
        if not plugin_rows("server.drafts.operations", "OPERATIONS"):
            raise DraftNotFound("draft_path needs server/drafts and workers/drafts, which this installation is without")
        if checkpoint.base_model != base_model:
            raise DraftNotFound(
                f"draft {checkpoint.tinker_path} was trained for {checkpoint.base_model}, but the request samples "
                f"{base_model}: set draft_path to a draft of {base_model}"
            )
        return checkpoint

    async def draft_for(self, sampler: Sampler, request: SampleRequest) -> CheckpointRecord | None:
        """Returns the draft for the request: its own, else the sampler's, else None.

        Raises:
            DraftNotFound: it does not exist or does not fit the base model.
        """
        if request.draft_path is None:
            return await self._of_sampler(sampler)
        if not request.draft_path:
            return None
        return await self.find(sampler.record.tenant_id, request.draft_path, sampler.record.base_model)

    @asynccontextmanager
    async def use(self, checkpoint: CheckpointRecord | None) -> AsyncIterator[str | None]:
        """Loads the draft, keeps it loaded within the block, and yields its id in the workers (None without a draft).

        Raises:
            OperationError: it cannot be loaded.
        """
        if checkpoint is None:
            yield None
            return
        held = self._entry(checkpoint)
        held.num_users += 1
        try:
            await self._load(held)
            yield draft_id(checkpoint)
        finally:
            held.num_users -= 1
            if not held.is_needed:
                loop = asyncio.get_running_loop()
                held.dropping = loop.call_later(self._unused_seconds, self._begin, self._drop, held)

    def release(self, sampler: Sampler) -> None:
        """Releases the draft of a sampler that has ended or changes its draft; drops it if nothing else uses it."""
        draft, sampler.draft = sampler.draft, None
        if draft is None:
            return
        held = self._entry(draft)
        held.sampler_ids.discard(sampler.record.sampler_id)
        if not held.is_needed:
            self._begin(self._drop, held)

    async def _of_sampler(self, sampler: Sampler) -> CheckpointRecord | None:
        """Returns the sampler's draft. A loaded draft is kept even if its checkpoint was deleted or replaced."""
        record = sampler.record
        if record.draft_path is None or self._has(record.base_model, sampler.draft):
            return sampler.draft
        try:
            found = await self.find(record.tenant_id, record.draft_path, record.base_model)
        except DraftNotFound as error:
            message = f'the draft of sampler {record.sampler_id} cannot be loaded: {error}; send draft_path ""'
            raise DraftNotFound(f"{message} to sample without a draft, or name another one", error.status) from None
        if not sampler.has_ended and found != sampler.draft:
            self.release(sampler)
            sampler.draft = found
            self._entry(found).sampler_ids.add(record.sampler_id)
        return found

    def _has(self, base_model: str, draft: CheckpointRecord | None) -> bool:
        return draft is not None and self._dispatch.has_draft(base_model, draft_id(draft))

    def _entry(self, checkpoint: CheckpointRecord) -> _LoadedDraft:
        held = self._held.setdefault(draft_id(checkpoint), _LoadedDraft(checkpoint))
        _cancel_drop(held)
        return held

    async def _load(self, held: _LoadedDraft) -> None:
        """Loads the draft; concurrent callers wait for the first one's load. Retries when the worker crashes."""
        strikes = Strikes(f"the load of draft {held.checkpoint.tinker_path}")
        # While it is being dropped, the workers still have it.
        while held.changing.locked() or not self._has(held.checkpoint.base_model, held.checkpoint):
            try:
                # Shielded: the request may be cancelled, but the worker reads the files to the end.
                await asyncio.shield(self._begin(self._load_now, held))
                return
            except WorkerLost as lost:
                await strikes.add(lost)

    async def _load_now(self, held: _LoadedDraft) -> None:
        async with held.changing:
            if held.is_needed and not self._has(held.checkpoint.base_model, held.checkpoint):
                await self._read(held.checkpoint)

    async def _read(self, checkpoint: CheckpointRecord) -> None:
        try:
            async with self._checkpoints.reading(checkpoint) as directory:
                with hiding_directory_as(f"draft {checkpoint.tinker_path}", directory):
                    await self._dispatch.load_draft(checkpoint.base_model, draft_id(checkpoint), directory)
        except WorkerLost:
            raise
        except OperationError as error:
            raise DraftNotLoaded(error.message, error.category) from None

    async def _drop(self, held: _LoadedDraft) -> None:
        checkpoint = held.checkpoint
        async with held.changing:
            if held.is_needed or self._held.get(draft_id(checkpoint)) is not held:
                return
            try:
                await self._dispatch.drop_draft(checkpoint.base_model, draft_id(checkpoint))
            except OperationError as error:
                logger.warning("draft %s could not be dropped: %s", checkpoint.tinker_path, error)
            if not held.is_needed:
                self._held.pop(draft_id(checkpoint), None)

    def _begin(
        self, work: Callable[[_LoadedDraft], Coroutine[None, None, None]], held: _LoadedDraft
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work(held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def draft_id(checkpoint: CheckpointRecord) -> str:
    """Returns the draft's id in the workers. It contains the directory name, which is unique per checkpoint version."""
    return f"draft:{checkpoint.tinker_path}@{PurePosixPath(checkpoint.directory).name}"


def _cancel_drop(held: _LoadedDraft) -> None:
    if held.dropping is not None:
        held.dropping.cancel()
        held.dropping = None

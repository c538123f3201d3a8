"""Loads draft models for speculative sampling into the workers.

A draft is loaded at the first request that needs it, once for all samplers that name it, and again after a worker
crash. It is dropped when no sampler names it and no request has used it for DROP_AFTER_SECONDS.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import PurePosixPath

from ...schemas.errors import OperationError, RequestError
from ...schemas.sampling import SampleRequest
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.calls import WorkerLost
from ..checkpoints.checkpoints import Checkpoints, hiding_directory_as
from ..http.verbs import HAS_DRAFTS
from ..store import CheckpointRecord
from ..tenants.auth import Tenant
from .sampler import Sampler
from .worker_weights import WorkerWeights

DROP_AFTER_SECONDS = 600.0


class DraftNotFound(RequestError):
    """Raised if the draft of a request or of a sampler does not exist, or does not fit the base model."""


class DraftNotLoaded(OperationError):
    """Raised if a draft's files cannot be loaded."""


class DraftLoader(WorkerWeights[CheckpointRecord]):
    """Owns the drafts of all tenants; those that can read a checkpoint share its draft. Samplers hold the drafts that
    they name, and requests those that they use."""

    def __init__(
        self, dispatch: WorkerDispatch, checkpoints: Checkpoints, unused_seconds: float = DROP_AFTER_SECONDS
    ) -> None:
        super().__init__()
        self._dispatch = dispatch
        self._checkpoints = checkpoints
        self._unused_seconds = unused_seconds

    async def find(self, tenant_id: str, path: str, base_model: str) -> CheckpointRecord:
        """Returns the checkpoint of a draft for this base model. Raises DraftNotFound: 404 if the tenant cannot read
        it, 400 if it is no draft of this base model."""
        try:
            checkpoint = await self._checkpoints.resolve(Tenant(tenant_id, ""), path)
        except RequestError as error:
            raise DraftNotFound(error.message, error.status) from None
        if checkpoint.role != "draft":
            raise DraftNotFound(
                f"{checkpoint.tinker_path} was saved by a {checkpoint.role}, which cannot draft tokens: set draft_path "
                "to a checkpoint of a draft"
            )
        if not HAS_DRAFTS:
            raise DraftNotFound("draft_path needs server/drafts and workers/drafts, which this installation is without")
        if checkpoint.base_model != base_model:
            raise DraftNotFound(
                f"draft {checkpoint.tinker_path} was trained for {checkpoint.base_model}, but the request samples "
                f"{base_model}: set draft_path to a draft of {base_model}"
            )
        return checkpoint

    async def draft_for(self, sampler: Sampler, request: SampleRequest) -> CheckpointRecord | None:
        """Returns the draft for the request: its own, else the sampler's, else None. Raises DraftNotFound."""
        if request.draft_path is None:
            return await self._of_sampler(sampler)
        if not request.draft_path:
            return None
        return await self.find(sampler.record.tenant_id, request.draft_path, sampler.record.base_model)

    @asynccontextmanager
    async def use(self, checkpoint: CheckpointRecord | None) -> AsyncIterator[str | None]:
        """Loads the draft, keeps it loaded within the block, and yields its id in the workers (None without a draft).
        Raises OperationError."""
        if checkpoint is None:
            yield None
            return
        request = object()
        self.hold(checkpoint, request)
        try:
            await self.load(checkpoint)
            yield draft_id(checkpoint)
        finally:
            self.release(checkpoint, request, self._unused_seconds)

    def release_of(self, sampler: Sampler) -> None:
        """Releases the draft of a sampler that has ended or changes its draft; drops it if nothing else uses it."""
        draft, sampler.draft = sampler.draft, None
        if draft is not None:
            self.release(draft, sampler)

    def id_of(self, item: CheckpointRecord) -> str:
        return draft_id(item)

    def name_of(self, item: CheckpointRecord) -> str:
        return f"draft {item.tinker_path}"

    def is_loaded(self, item: CheckpointRecord) -> bool:
        return self._dispatch.has_weights(item.base_model, draft_id(item))

    async def load_now(self, item: CheckpointRecord) -> None:
        try:
            async with self._checkpoints.reading(item) as directory:
                with hiding_directory_as(self.name_of(item), directory):
                    await self._dispatch.load_draft(item.base_model, draft_id(item), directory)
        except WorkerLost:
            raise
        except OperationError as error:
            raise DraftNotLoaded(error.message, error.category) from None

    async def drop_now(self, item: CheckpointRecord) -> None:
        await self._dispatch.drop_draft(item.base_model, draft_id(item))

    async def _of_sampler(self, sampler: Sampler) -> CheckpointRecord | None:
        """Returns the sampler's draft. A loaded draft is kept even if its checkpoint was deleted or replaced."""
        record = sampler.record
        if record.draft_path is None or (sampler.draft is not None and self.is_loaded(sampler.draft)):
            return sampler.draft
        try:
            found = await self.find(record.tenant_id, record.draft_path, record.base_model)
        except DraftNotFound as error:
            message = f'the draft of sampler {record.sampler_id} cannot be loaded: {error}; send draft_path ""'
            raise DraftNotFound(f"{message} to sample without a draft, or name another one", error.status) from None
        if not sampler.has_ended and found != sampler.draft:
            self.release_of(sampler)
            sampler.draft = found
            self.hold(found, sampler)
        return found


def draft_id(checkpoint: CheckpointRecord) -> str:
    """Returns the draft's id in the workers. It contains the directory name, which is unique per checkpoint version."""
    return f"draft:{checkpoint.tinker_path}@{PurePosixPath(checkpoint.directory).name}"

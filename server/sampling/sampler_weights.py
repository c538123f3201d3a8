"""Weights of samplers: saves those of ephemeral ones on disk, and loads all into the workers."""

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from ...schemas.errors import OperationError
from ...workers.dispatch import WorkerDispatch
from ..checkpoints.checkpoints import Checkpoints, hiding_directory_as
from ..files.manifest import ManifestMismatch
from ..logs.repeated_errors import refusing_full_disk
from ..store.database.database_errors import OUTAGE_ERRORS, OUTAGE_RETRY_SECONDS, outage_message
from ..tenants.auth import Tenant
from .ephemeral_weights import EphemeralWeights
from .sampler import Sampler
from .worker_weights import WorkerWeights

logger = logging.getLogger(__name__)


class LiveWeights(Protocol):
    """The training runs, as far as their samplers need them."""

    async def share(self, run_id: str, adapter_id: str) -> bool:
        """Gives the sampler the run's live weights; False if that run does not share them. Raises OperationError if the
        copy failed, WorkerLost if the workers lost the run."""
        ...


class SamplerWeights(WorkerWeights[Sampler]):
    """Loads a sampler's weights from its live run, its ephemeral files or its checkpoint. Samplers hold theirs."""

    live: LiveWeights
    """Set before the first request."""

    def __init__(self, dispatch: WorkerDispatch, checkpoints: Checkpoints, files: EphemeralWeights) -> None:
        super().__init__()
        self.files = files
        self._dispatch = dispatch
        self._checkpoints = checkpoints
        # Adapters that this server gave to the workers: those of an earlier server may have other weights.
        self._given: set[str] = set()

    def hold_of(self, sampler: Sampler) -> None:
        if sampler.adapter_id is not None:
            self.hold(sampler, sampler)

    def release_of(self, sampler: Sampler) -> None:
        if sampler.adapter_id is not None:
            self.release(sampler, sampler)

    async def save_from_run(self, run_id: str, adapter_id: str) -> None:
        """Copies the run's current weights to an ephemeral sampler, first to disk and then in the workers. Raises
        OperationError."""
        with refusing_full_disk("the sampler's weights were"):
            async with self.files.writing(adapter_id) as directory:
                await self._dispatch.save_run(run_id, directory, optimizer=False)
        # Copied only after the files are written, so that a concurrent reload reads the new weights.
        await self._dispatch.copy_adapter(run_id, adapter_id)
        self._given.add(adapter_id)

    def id_of(self, item: Sampler) -> str:
        assert item.adapter_id is not None
        return item.adapter_id

    def name_of(self, item: Sampler) -> str:
        return f"the weights of sampler {item.record.sampler_id}"

    def is_loaded(self, item: Sampler) -> bool:
        adapter_id = self.id_of(item)
        return adapter_id in self._given and self._dispatch.has_weights(item.record.base_model, adapter_id)

    def forget(self, item: Sampler) -> None:
        """Has the weights loaded again by the next request: the workers may have them no longer, or in part."""
        self._given.discard(self.id_of(item))

    async def load_now(self, item: Sampler) -> None:
        """Loads the weights; waits while the database is away. Raises OperationError, RequestError."""
        while not item.has_ended:
            try:
                await self._load(item)
                self._given.add(self.id_of(item))
            except OUTAGE_ERRORS as error:
                outage = outage_message(error)
                if outage != item.outage:
                    logger.error("sampler %s waits: %s", item.record.sampler_id, outage)
                item.outage = outage
                await asyncio.sleep(OUTAGE_RETRY_SECONDS)
            else:
                item.outage = None
                return

    async def drop_now(self, item: Sampler) -> None:
        self._given.discard(self.id_of(item))
        await self.files.remove(self.id_of(item))
        await self._dispatch.drop_adapter(self.id_of(item))

    async def _load(self, sampler: Sampler) -> None:
        record, adapter_id = sampler.record, self.id_of(sampler)
        if record.run_id is not None and await self.live.share(record.run_id, adapter_id):
            return
        if record.model_path is None:
            directory = await self._find(sampler)
            with hiding_directory_as(f"sampler {record.sampler_id}", directory):
                await self._dispatch.load_adapter(record.base_model, adapter_id, directory)
            return
        checkpoint = await self._checkpoints.resolve(Tenant(record.tenant_id, ""), record.model_path)
        async with self._checkpoints.reading(checkpoint) as directory:
            with hiding_directory_as(checkpoint.tinker_path, directory):
                await self._dispatch.load_adapter(record.base_model, adapter_id, directory)

    async def _find(self, sampler: Sampler) -> Path:
        try:
            return await self.files.find(self.id_of(sampler))
        except ManifestMismatch as damage:
            logger.error("the weights of sampler %s: %s", sampler.record.sampler_id, damage)
            raise OperationError(
                f"the weights of sampler {sampler.record.sampler_id} are damaged ({damage.reason}): "
                "save_weights_for_sampler again, or sample a named checkpoint",
                "server",
            ) from None

"""Loads the weights of samplers into the workers: at the first request, and again after a worker crash."""

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from ...schemas.errors import OperationError
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.calls import WorkerLost
from ..checkpoints.checkpoints import Checkpoints, hiding_directory_as
from ..files.manifest import ManifestMismatch
from ..journal.strikes import Strikes
from ..store.database.database_errors import OUTAGE_ERRORS, OUTAGE_RETRY_SECONDS, outage_message
from ..tenants.auth import Tenant
from .ephemeral_weights import EphemeralWeights
from .sampler import Sampler

logger = logging.getLogger(__name__)


class LiveWeights(Protocol):
    """The training runs, as far as their samplers need them."""

    async def share(self, run_id: str, adapter_id: str) -> bool:
        """Gives the sampler the run's live weights; False if that run does not share them.

        Raises:
            OperationError: the copy failed; WorkerLost if the workers lost the run.
        """
        ...


class WeightLoader:
    """Loads a sampler's weights from its live run, its ephemeral files or its checkpoint."""

    def __init__(
        self, dispatch: WorkerDispatch, checkpoints: Checkpoints, weights: EphemeralWeights, live: LiveWeights
    ) -> None:
        self._dispatch = dispatch
        self._checkpoints = checkpoints
        self._weights = weights
        self._live = live

    async def load(self, sampler: Sampler) -> "asyncio.Future[None] | None":
        """Loads the sampler's weights; concurrent callers share one load.

        Retries when the worker crashes, and while the database is away.

        Returns:
            The completed load, which a caller passes to `invalidate`; None for a bare base model.
        Raises:
            OperationError, RequestError: the weights cannot be loaded.
        """
        if sampler.record.kind == "base":
            return None
        strikes = Strikes(f"the load of the weights of sampler {sampler.record.sampler_id}")
        while True:
            loading = sampler.loading = sampler.loading or asyncio.create_task(self._load_now(sampler))
            try:
                await asyncio.shield(loading)
            except WorkerLost as lost:
                self.invalidate(sampler, loading)
                await strikes.add(lost)
            except OUTAGE_ERRORS as error:
                self.invalidate(sampler, loading)
                outage = outage_message(error)
                if outage != sampler.outage:
                    logger.error("sampler %s waits: %s", sampler.record.sampler_id, outage)
                sampler.outage = outage
                await asyncio.sleep(OUTAGE_RETRY_SECONDS)
            except Exception:
                self.invalidate(sampler, loading)
                raise
            else:
                sampler.outage = None
                return loading

    def invalidate(self, sampler: Sampler, loading: "asyncio.Future[None] | None") -> None:
        """Makes the next request reload the adapter, which a worker crash may have lost.

        No-op if `loading` is outdated: then another caller has already started a new load.
        """
        if sampler.loading is loading:
            sampler.loading = None

    async def _load_now(self, sampler: Sampler) -> None:
        record = sampler.record
        assert sampler.adapter_id is not None
        if record.run_id is not None and await self._live.share(record.run_id, sampler.adapter_id):
            return
        if record.model_path is None:
            directory = await self._find(sampler)
            with hiding_directory_as(f"sampler {record.sampler_id}", directory):
                await self._dispatch.load_adapter(record.base_model, sampler.adapter_id, directory)
            return
        checkpoint = await self._checkpoints.resolve(Tenant(record.tenant_id, ""), record.model_path)
        async with self._checkpoints.reading(checkpoint) as directory:
            with hiding_directory_as(checkpoint.tinker_path, directory):
                await self._dispatch.load_adapter(record.base_model, sampler.adapter_id, directory)

    async def _find(self, sampler: Sampler) -> Path:
        assert sampler.adapter_id is not None
        try:
            return await self._weights.find(sampler.adapter_id)
        except ManifestMismatch as damage:
            logger.error("the weights of sampler %s: %s", sampler.record.sampler_id, damage)
            raise OperationError(
                f"the weights of sampler {sampler.record.sampler_id} are damaged ({damage.reason}): "
                "save_weights_for_sampler again, or sample a named checkpoint",
                "server",
            ) from None

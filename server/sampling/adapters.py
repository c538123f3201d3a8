"""Adapters: the weights of samplers in the workers, loaded when they are first asked for, and again when lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from ...schemas.errors import OperationError, RequestError
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.verbs import WorkerLost
from ..checkpoints.checkpoints import Checkpoints, loaded_as
from ..journal.quarantine import Strikes
from ..logs.repeated_errors import room_for
from ..tenants.auth import Tenant
from .ephemeral import EphemeralWeights
from .sampler import Sampler

logger = logging.getLogger(__name__)


class Adapters:
    """weights: of ephemeral samplers; those of others are checkpoints. share: see Runs; of a run and an adapter."""

    def __init__(
        self,
        dispatch: WorkerDispatch,
        checkpoints: Checkpoints,
        weights: EphemeralWeights,
        share: Callable[[str, str], Awaitable[bool]],
    ) -> None:
        self._dispatch = dispatch
        self._checkpoints = checkpoints
        self._weights = weights
        self._share = share
        self._dropping: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for dropping in self._dropping:
            dropping.cancel()
        await asyncio.gather(*self._dropping, return_exceptions=True)

    def has(self, adapter_id: str | None) -> bool:
        """Whether the weights of an ephemeral sampler are there."""
        return self._weights.has(adapter_id)

    async def sweep(self, wanted: Collection[str | None]) -> None:
        """At start, what belongs to no sampler any more."""
        await self._weights.sweep(wanted)

    async def take(self, run_id: str, adapter_id: str) -> None:
        """For an ephemeral sampler the weights that the run has now; durable, too. Raises OperationError."""
        with room_for("the sampler's weights were"):
            async with self._weights.writing(adapter_id) as directory:
                await self._dispatch.save_run(run_id, directory, optimizer=False)
        # Behind that: who loads it anew meanwhile loads these weights.
        await self._dispatch.copy_adapter(run_id, adapter_id)

    async def forget(self, adapter_id: str) -> None:
        """What was taken for it, and did not reach the workers."""
        await self._weights.remove(adapter_id)

    async def load(self, sampler: Sampler) -> "asyncio.Future[None] | None":
        """Once, for whoever comes first; returns that loading, None where there is nothing to load.

        Raises OperationError, RequestError.
        """
        if sampler.record.kind == "base":
            return None
        strikes = Strikes(f"load the weights of sampler {sampler.record.sampler_id}")
        while True:
            loading = sampler.loading = sampler.loading or asyncio.create_task(self._load_now(sampler))
            try:
                await asyncio.shield(loading)
            except WorkerLost as lost:
                self.load_again(sampler, loading)
                await strikes.add(lost)
            except (OperationError, RequestError):
                self.load_again(sampler, loading)
                raise
            else:
                return loading

    def load_again(self, sampler: Sampler, loading: "asyncio.Future[None] | None") -> None:
        """The worker may have died, and the adapter with it; unless somebody else has seen to that."""
        if sampler.loading is loading:
            sampler.loading = None

    def drop(self, adapter_id: str, loading: asyncio.Future[None] | None) -> None:
        """When it is not being loaded any more, and the worker comes to it."""
        dropping = asyncio.create_task(self._drop(adapter_id, loading))
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)

    async def _load_now(self, sampler: Sampler) -> None:
        record = sampler.record
        assert sampler.adapter_id is not None
        if record.run_id is not None and await self._share(record.run_id, sampler.adapter_id):
            return
        if record.model_path is None:
            directory = self._weights.directory(sampler.adapter_id)
            with loaded_as(f"sampler {record.sampler_id}", directory):
                await self._dispatch.load_adapter(record.base_model, sampler.adapter_id, directory)
            return
        checkpoint = await self._checkpoints.resolve(Tenant(record.tenant_id, ""), record.model_path)
        async with self._checkpoints.reading(checkpoint) as directory:
            with loaded_as(checkpoint.tinker_path, directory):
                await self._dispatch.load_adapter(record.base_model, sampler.adapter_id, directory)

    async def _drop(self, adapter_id: str, loading: asyncio.Future[None] | None) -> None:
        if loading is not None:
            await asyncio.wait({loading})
        await self._weights.remove(adapter_id)
        try:
            await self._dispatch.drop_adapter(adapter_id)
        except OperationError as error:
            logger.warning("adapter %s could not be dropped: %s", adapter_id, error)

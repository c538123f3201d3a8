"""Keeps the weights of ephemeral samplers on disk and in the workers, and drops those of ended samplers."""

import asyncio
import logging

from ...schemas.errors import OperationError
from ...workers.dispatch import WorkerDispatch
from ..logs.repeated_errors import refusing_full_disk
from .ephemeral_weights import EphemeralWeights

logger = logging.getLogger(__name__)


class SamplerWeights:
    """Saves and drops the weights of samplers; `WeightLoader` loads them. files: of ephemeral samplers."""

    def __init__(self, dispatch: WorkerDispatch, files: EphemeralWeights) -> None:
        self.files = files
        self._dispatch = dispatch
        self._dropping: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for dropping in self._dropping:
            dropping.cancel()
        await asyncio.gather(*self._dropping, return_exceptions=True)

    async def save_from_run(self, run_id: str, adapter_id: str) -> None:
        """Copies the run's current weights to an ephemeral sampler, first to disk and then in the workers.

        Raises:
            OperationError: the weights could not be saved or copied.
        """
        with refusing_full_disk("the sampler's weights were"):
            async with self.files.writing(adapter_id) as directory:
                await self._dispatch.save_run(run_id, directory, optimizer=False)
        # Copied only after the files are written, so that a concurrent reload reads the new weights.
        await self._dispatch.copy_adapter(run_id, adapter_id)

    def drop(self, adapter_id: str, loading: asyncio.Future[None] | None) -> None:
        """Deletes the adapter's files and drops it from the workers in the background, after `loading` has ended."""
        dropping = asyncio.create_task(self._drop(adapter_id, loading))
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)

    async def _drop(self, adapter_id: str, loading: asyncio.Future[None] | None) -> None:
        if loading is not None:
            await asyncio.wait({loading})
        await self.files.remove(adapter_id)
        try:
            await self._dispatch.drop_adapter(adapter_id)
        except OperationError as error:
            logger.warning("adapter %s could not be dropped: %s", adapter_id, error)

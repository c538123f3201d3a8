"""The weights that vLLM has under its adapters: the base model's, or those of a full model in their place."""

import asyncio
import logging
import time

from ....schemas.errors import OperationError
from ..in_flight import cancel_and_wait
from ..weights import WeightTransferStats
from .adapter_version import VllmAdapterVersion
from .api import VllmApi, VllmFailed, VllmUnreachable
from .server import VllmServer

logger = logging.getLogger(__name__)


class BaseWeights:
    """Replaces the weights in place. No request runs meanwhile, see VllmAdapters.in_use."""

    def __init__(self, api: VllmApi, server: VllmServer) -> None:
        self._api, self._server = api, server
        # None for the base model's weights, with which every vLLM starts.
        self._loaded: VllmAdapterVersion | None = None
        self._are_defined = True
        self._start = 0
        self._lock = asyncio.Lock()
        self._loading: set[asyncio.Task[None]] = set()
        self.pushes = WeightTransferStats()

    async def load(self, full: VllmAdapterVersion | None, start: int) -> None:
        """Loads the full model, or the base model if it is None, unless vLLM has it.

        Args:
            start: VllmServer.num_starts of the vLLM that must have it.
        Raises:
            OperationError: vLLM cannot load these weights.
            VllmUnreachable: it is down, or starts again.
        """
        if self._has(full, start):
            return
        # A cancelled request must not end the loading, of which vLLM would continue with a part.
        loading = asyncio.create_task(self._load(full, start))
        self._loading.add(loading)
        loading.add_done_callback(self._loading.discard)
        await asyncio.shield(loading)

    async def close(self) -> None:
        await cancel_and_wait(self._loading)

    def _has(self, full: VllmAdapterVersion | None, start: int) -> bool:
        if start > self._start:
            self._start, self._loaded, self._are_defined = start, None, True
        return self._start == start and self._are_defined and self._loaded is full and not self._lock.locked()

    async def _load(self, full: VllmAdapterVersion | None, start: int) -> None:
        async with self._lock:
            if self._start != start:
                raise VllmUnreachable("has restarted", reached=False)
            if self._are_defined and self._loaded is full:
                return
            if full is not None and full.refusal is not None:
                raise OperationError(full.refusal)
            self._are_defined, began = False, time.monotonic()
            try:
                await self._api.load_weights(self._server.source if full is None else str(full.directory))
            except BaseException as error:
                await self._give_up(full, error)
                raise
            self._loaded, self._are_defined = full, True
            self._record(time.monotonic() - began)

    async def _give_up(self, full: VllmAdapterVersion | None, error: BaseException) -> None:
        """Ends our vLLM, whose weights are undefined. If it could not read them, the next one does not try again.

        Raises OperationError then.
        """
        is_alive = isinstance(error, (VllmFailed, OperationError)) and await self._api.is_healthy()
        self._server.kill()
        if full is not None and is_alive:
            logger.error("vLLM cannot load the weights of %s from %s: %s", full.name, full.directory, error)
            reason = str(error).replace(str(full.directory), "their directory")
            full.refusal = (
                f"vLLM cannot load the weights of {full.adapter_id}: {reason}; sample them from a server with --sampler"
                " native"
            )
            raise OperationError(full.refusal) from None
        if isinstance(error, OperationError):
            raise VllmFailed(str(error), reached=False) from None

    def _record(self, seconds: float) -> None:
        full = self._loaded
        if full is None:
            logger.info("%s has the base model's weights again, after %.3f s", self._server.name, seconds)
            return
        num_bytes = full.num_bytes
        self.pushes.add(num_bytes, seconds)
        logger.info(
            "%s has version %d of the weights of %s: %d bytes in %.3f s",
            self._server.name, full.number, full.adapter_id, num_bytes, seconds,
        )  # fmt: skip

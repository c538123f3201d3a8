"""The weights that vLLM has at one place: under its adapters, the base model's or a full model's; or a draft's."""

import asyncio
import logging
import time

from ....schemas.errors import OperationError
from ..in_flight import cancel_and_wait
from ..weights import WeightTransferStats
from .adapters import VllmVersion, full_weight_files
from .api import Part, VllmApi, VllmFailed, VllmUnreachable
from .server import VllmServer

logger = logging.getLogger(__name__)


class PlacedWeights:
    """Replaces the weights in place.

    No request runs while those of the model are replaced, see VllmAdapters.in_use.
    """

    def __init__(self, api: VllmApi, server: VllmServer, part: Part) -> None:
        self._api, self._server = api, server
        self._part: Part = part
        # None for the weights with which every vLLM starts.
        self._loaded: VllmVersion | None = None
        self._are_defined = True
        self._start = 0
        self._lock = asyncio.Lock()
        self._loading: set[asyncio.Task[None]] = set()
        self.pushes = WeightTransferStats()

    async def load(self, wanted: VllmVersion | None, start: int) -> None:
        """Loads the version, or the base model if it is None, unless vLLM has it.

        Args:
            start: VllmServer.num_starts of the vLLM that must have it.
        Raises:
            OperationError: vLLM cannot load these weights.
            VllmUnreachable: it is down, or starts again.
        """
        if self._has(wanted, start):
            return
        # A cancelled request must not end the loading, of which vLLM would continue with a part.
        loading = asyncio.create_task(self._load(wanted, start))
        self._loading.add(loading)
        loading.add_done_callback(self._loading.discard)
        await asyncio.shield(loading)

    async def close(self) -> None:
        await cancel_and_wait(self._loading)

    def _has(self, wanted: VllmVersion | None, start: int) -> bool:
        if start > self._start:
            self._start, self._loaded, self._are_defined = start, None, True
        return self._start == start and self._are_defined and self._loaded is wanted and not self._lock.locked()

    async def _load(self, wanted: VllmVersion | None, start: int) -> None:
        async with self._lock:
            if self._start != start:
                raise VllmUnreachable("has restarted", reached=False)
            if self._are_defined and self._loaded is wanted:
                return
            if wanted is not None and wanted.refusal is not None:
                raise OperationError(wanted.refusal)
            self._are_defined, began = False, time.monotonic()
            try:
                source = self._server.source if wanted is None else str(wanted.directory)
                await self._api.load_weights(source, self._part)
            except BaseException as error:
                await self._give_up(wanted, error)
                raise
            self._loaded, self._are_defined = wanted, True
            self._record(time.monotonic() - began)

    async def _give_up(self, wanted: VllmVersion | None, error: BaseException) -> None:
        """Ends our vLLM, whose weights are undefined. If it could not read them, the next one does not try again.

        Raises OperationError then.
        """
        is_alive = isinstance(error, (VllmFailed, OperationError)) and await self._api.is_healthy()
        self._server.kill()
        if wanted is not None and is_alive:
            logger.error("vLLM cannot load the weights of %s from %s: %s", wanted.name, wanted.directory, error)
            reason = str(error).replace(str(wanted.directory), "their directory")
            wanted.refusal = (
                f"vLLM cannot load the weights of {wanted.owner}: {reason}; sample with them from a server with"
                " --sampler native"
            )
            raise OperationError(wanted.refusal) from None
        if isinstance(error, OperationError):
            raise VllmFailed(str(error), reached=False) from None

    def _record(self, seconds: float) -> None:
        wanted = self._loaded
        if wanted is None:
            logger.info("%s has the base model's weights again, after %.3f s", self._server.name, seconds)
            return
        num_bytes = sum(file.stat().st_size for file in full_weight_files(wanted.directory))
        self.pushes.add(num_bytes, seconds)
        logger.info(
            "%s has version %d of the weights of %s: %d bytes in %.3f s",
            self._server.name, wanted.number, wanted.owner, num_bytes, seconds,
        )  # fmt: skip

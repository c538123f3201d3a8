"""Time limits for requests to a vLLM that is down or hangs. While our own server restarts, requests wait without
limit.
"""

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import TypeVar

from ....schemas.errors import OperationError
from ...scheduler.backoff import backoff
from ..in_flight import cancel_and_wait
from .api import VllmApi, VllmUnreachable
from .server import VllmServer

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 8.0

# Health checks within the time for which requests wait.
_NUM_LOOKS = 12

Done = TypeVar("Done")


class RetryDeadline:
    """Delays the retries of one request, and ends them."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        self._num_retries = 0
        self._gone_since: float | None = None

    async def wait(self, gone: VllmUnreachable) -> None:
        """Waits before the next retry. Raises OperationError if the server has been gone for too long."""
        if gone.reached or self._gone_since is None:
            self._gone_since = time.monotonic()
        most = self._server.retry_seconds
        if most is not None and time.monotonic() - self._gone_since > most:
            raise _silent(self._server, most, str(gone))
        self._num_retries += 1
        await asyncio.sleep(backoff(self._num_retries, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS))


class HealthMonitor:
    """Health checks of a server while requests wait for it: a server that hangs keeps their connections open."""

    def __init__(self, server: VllmServer, api: VllmApi) -> None:
        self._server = server
        self._api = api
        self._checked_at = self._answered_at = -math.inf

    async def watch(self, work: Coroutine[None, None, Done]) -> Done:
        """Returns the result of `work`. Raises OperationError if the server is silent for too long."""
        most = self._server.retry_seconds
        if most is None:
            return await work
        tasks = working, silence = asyncio.create_task(work), asyncio.create_task(self._silence(most))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if silence.done() and not working.done():
                raise _silent(self._server, most, "it accepts requests but does not respond")
            return working.result()
        finally:
            await cancel_and_wait(tasks)

    async def _silence(self, most: float) -> None:
        """Returns when the server has been silent for `most` seconds."""
        started, pause = time.monotonic(), most / _NUM_LOOKS
        while time.monotonic() - max(started, self._answered_at) < most:
            await asyncio.sleep(pause)
            # One check serves all waiting requests.
            if time.monotonic() - self._checked_at >= pause:
                self._checked_at = time.monotonic()
                if await self._api.is_healthy(pause):
                    self._answered_at = time.monotonic()


def _silent(server: VllmServer, seconds: float, reason: str) -> OperationError:
    return OperationError(
        f"{server.name} has not responded for {seconds:.0f} seconds ({reason}): start it, or start this server with"
        " --sampler native",
        "server",
    )

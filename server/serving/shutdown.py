"""Drains the server between the stop signal and the closing of its connections.

Accepted work continues, and runs are snapshotted. Work that does not finish is not lost: the next process recovers it
from the journal.
"""

import asyncio
import contextlib
import logging

from ..routes.services import Services

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 0.05


async def drain(services: Services, seconds: float) -> None:
    """Refuses new work; returns when all accepted work is done and all runs have snapshots, or after `seconds`."""
    services.quotas.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while services.runs.is_busy or services.samplers.is_busy:  # noqa: ASYNC110
                await asyncio.sleep(_PERIOD_SECONDS)
            await services.runs.snapshot()
            return
    logger.info("work that is not finished after %g s is left to the next start", seconds)

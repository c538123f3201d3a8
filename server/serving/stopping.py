"""Stopping: from the signal to the closing of the doors, what was accepted goes on and is brought into snapshots.

What it does not come to is no loss: the next process takes it up from the journal.
"""

import asyncio
import contextlib
import logging

from ..routes.services import Services

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 0.05


async def drain(services: Services, seconds: float) -> None:
    """Accepts nothing from now on; returns when nothing is under way any more and all runs have snapshots, or then."""
    services.quotas.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while services.runs.is_busy or services.samplers.is_busy:  # noqa: ASYNC110
                await asyncio.sleep(_PERIOD_SECONDS)
            await services.runs.snapshot()
            return
    logger.info("work that is still under way after %g s is left to the next start", seconds)

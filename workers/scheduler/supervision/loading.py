"""Starts the ranks of a base model, with retries if they are killed while loading, and explains failures."""

import asyncio
from collections.abc import Awaitable, Callable

from ...pools.base import WorkerDied, WorkerError
from ...protocol.worker_config import WorkerConfig
from ...resources.machine import available_bytes, gigabytes
from .backoff import backoff
from .footprint import planned_bytes

MAX_TRIES = 4
"""The retries follow pauses of 1, 2 and 4 seconds."""


async def load(
    config: WorkerConfig,
    name: str,
    attempt: Callable[[], Awaitable[None]],
    on_progress: Callable[[str], None],
) -> None:
    """Loads the model with retries.

    Args:
        attempt: one try, which must leave nothing behind when it fails.
    Raises:
        ValueError: it does not load; the message says why.
    """
    source = config.model.source
    for number in range(1, MAX_TRIES + 1):
        try:
            await attempt()
            return
        except (WorkerDied, EOFError, ConnectionError) as error:
            reason = failure_reason(error, config)
            if number == MAX_TRIES:
                raise ValueError(
                    f"base model {name} does not load from {source}, tried {number} times: {reason}"
                ) from error
            seconds = backoff(number, first=1.0)
            on_progress(f"{name} did not load: {reason}; trying again in {seconds:.0f} s")
            await asyncio.sleep(seconds)
        except (WorkerError, OSError) as error:
            raise ValueError(f"base model {name} does not load from {source}: {error}") from error


def failure_reason(error: Exception, config: WorkerConfig) -> str:
    """Explains the failure for the operator who can do something about it."""
    words = str(error) or type(error).__name__
    if isinstance(error, EOFError | OSError):
        words = f"the process that starts workers ended while it started one ({words})"
    elif "SIGKILL" not in words:
        return words
    planned, available = planned_bytes(config), available_bytes()
    needs = f"needs {gigabytes(planned)} of memory for its weights" if planned else "needs memory"
    there = f", and {gigabytes(available)} is available now" if available is not None else ""
    return (
        f"{words}: unless someone sent that signal, the kernel's out-of-memory killer did; loading it {needs}{there}: "
        "free memory, serve fewer or smaller models, or load them with --dtype bfloat16"
    )

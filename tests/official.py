"""The official SDK in tests: its clean-up is waited for only so long, for what has to be true is the server's part."""

import asyncio
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import tinker

CLOSE_SECONDS = 60


@contextmanager
def official_service(url: str, key: str) -> Iterator[tinker.ServiceClient]:
    """A service client whose session has ended on the server afterwards.

    Raises AssertionError, with what the SDK was still at, when the session did not end.
    """
    service = tinker.ServiceClient(base_url=url, api_key=key)
    try:
        yield service
    finally:
        holder, closing = service.holder, service.close("success")
        try:
            closing.result(CLOSE_SECONDS)
        except TimeoutError:  # a race in the SDK's clean-up may leave it waiting for a task of its own for ever
            tasks = [str(task) for task in asyncio.all_tasks(holder.get_loop())]
            print(f"the SDK is not closed after {CLOSE_SECONDS} s:", *tasks, sep="\n")
            assert _has_ended(url, key, holder.get_session_id()), tasks
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            gc.collect()  # of connections that the SDK leaves open, not in the midst of the next test


def _has_ended(url: str, key: str, session_id: str) -> bool:
    headers = {"X-API-Key": key}
    beat = httpx.post(f"{url}/api/v1/session_heartbeat", json={"session_id": session_id}, headers=headers, timeout=30)
    return beat.status_code == httpx.codes.GONE

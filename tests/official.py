"""The official SDK in tests. Its clean-up may hang, so tests wait only until the server has ended the session."""

import asyncio
import contextlib
import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import tinker

CLOSE_SECONDS = 60
CLEAN_UP_SECONDS = 5


@contextmanager
def official_service(url: str, key: str) -> Iterator[tinker.ServiceClient]:
    """Yields a service client whose session has ended on the server afterwards.

    Raises:
        AssertionError: the session did not end; lists the SDK's pending tasks.
    """
    service = tinker.ServiceClient(base_url=url, api_key=key)
    try:
        yield service
    finally:
        _close(service, url, key)
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            gc.collect()  # collects connections that the SDK leaves open now, not during the next test


def _close(service: tinker.ServiceClient, url: str, key: str) -> None:
    """A race in the SDK's clean-up may leave it waiting forever for one of its own tasks."""
    holder, closing = service.holder, service.close("success")
    session_id, deadline = holder.get_session_id(), time.monotonic() + CLOSE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            closing.result(CLEAN_UP_SECONDS)
            return
        if _has_ended(url, key, session_id):
            return
    raise AssertionError([str(task) for task in asyncio.all_tasks(holder.get_loop())])


def _has_ended(url: str, key: str, session_id: str) -> bool:
    headers = {"X-API-Key": key}
    try:
        beat = httpx.post(f"{url}/api/v1/session_heartbeat", json={"session_id": session_id}, headers=headers)
    except httpx.TransportError:
        return False
    return beat.status_code == httpx.codes.GONE

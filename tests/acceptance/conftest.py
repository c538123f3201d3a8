"""The official SDK never closes some of its connections: they are collected here, where nobody is blamed for them."""

import asyncio
import gc
import time
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _collect_what_the_sdk_left() -> Iterator[None]:
    """As soon as these tests are over: a later test would be failed for whatever is collected while it runs."""
    yield
    deadline = time.monotonic() + 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
        # Its background thread may be closing a client at this moment.
        while _has_open_transports() and time.monotonic() < deadline:
            time.sleep(0.2)
            gc.collect()


def _has_open_transports() -> bool:
    # By type: isinstance would ask lazy proxies of other libraries, some of which warn.
    return any(issubclass(type(each), asyncio.Transport) for each in gc.get_objects())

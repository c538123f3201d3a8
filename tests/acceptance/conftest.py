"""The official SDK never closes some of its connections: they are collected here, where nobody is blamed for them."""

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _collect_what_the_sdk_left() -> Iterator[None]:
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()

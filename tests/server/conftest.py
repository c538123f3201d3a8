"""Fixtures of the server's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .api import Api, running_api


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "state") as running:
        yield running

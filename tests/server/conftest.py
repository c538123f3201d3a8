"""Fixtures of the server's tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.serving.app import create_app
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.worker_config import ServedModel

from .api import Api, running_api
from .bench import MakeBench, benches
from .real import Server, running_server, server_config, started_dispatch
from .s3 import S3, s3_server


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "state") as running:
        yield running


@pytest.fixture
async def app(tmp_path: Path, anyio_backend: str) -> AsyncIterator[FastAPI]:
    """The application without workers."""
    config = ServerConfig.of(base_models=(ServedModel("tiny/qwen3", str(tmp_path)),), state_dir=tmp_path)
    app = create_app(config, WorkerDispatch(config.dispatch_config()))
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture(scope="module")
async def dispatch(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[WorkerDispatch]:
    async with started_dispatch(server_config(tiny_models["qwen3"], tmp_path_factory.mktemp("unused"))) as dispatch:
        yield dispatch


@pytest.fixture(scope="module")
async def server(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    config = server_config(tiny_models["qwen3"], tmp_path_factory.mktemp("state"))
    async with running_server(config, dispatch) as running:
        yield running


@pytest.fixture
async def make_bench(tmp_path: Path, anyio_backend: str) -> AsyncIterator[MakeBench]:
    async with benches(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server

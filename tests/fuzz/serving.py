"""Runs a whole server on a socket, with its event loop in a thread of this process and its workers in separate
processes."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.routes.services import Services
from trainhouse.server.serving.app import create_app
from trainhouse.server.serving.connections import HttpConnection
from trainhouse.workers.dispatch import WorkerDispatch

from ..server.real import started_dispatch

_START_SECONDS = 60


@dataclass(frozen=True)
class Served:
    url: str
    services: Services
    document: dict
    """OpenAPI."""


@contextmanager
def served(config: ServerConfig) -> Iterator[Served]:
    listener = socket.create_server(("127.0.0.1", 0))
    serving = _Serving(config, listener)
    thread = threading.Thread(target=lambda: asyncio.run(serving.run()))
    thread.start()
    try:
        assert serving.started.wait(_START_SECONDS) and serving.served is not None, "the log says why"
        yield serving.served
    finally:
        serving.stop()
        thread.join()


class _Serving:
    def __init__(self, config: ServerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._server: uvicorn.Server | None = None
        self.started = threading.Event()
        self.served: Served | None = None

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True

    async def run(self) -> None:
        try:
            async with started_dispatch(self._config) as dispatch:
                await self._serve(dispatch)
        finally:
            self.started.set()

    async def _serve(self, dispatch: WorkerDispatch) -> None:
        app = create_app(self._config, dispatch)
        async with app.router.lifespan_context(app):
            host, port = self._listener.getsockname()
            self.served = Served(f"http://{host}:{port}", app.state.services, app.openapi())
            self._server = _Server(
                uvicorn.Config(app, http=HttpConnection, lifespan="off", log_config=None, ws="none"),
                self.started,
            )
            await self._server.serve([self._listener])


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers, which only the main thread may set; sets an event when it listens."""

    def __init__(self, config: uvicorn.Config, started: threading.Event) -> None:
        super().__init__(config)
        self._listens = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listens.set()

"""Runs one server process: takes the state directory, binds the socket, loads models, serves, and shuts down.

On SQLite the state directory is locked for this process. How servers share a PostgreSQL is in server/replication.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from ...schemas.errors import OperationError
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.plugins import plugin_rows
from ...workers.protocol.worker_config import DispatchConfig, KeptWorkers
from ..config.option_values import is_url
from ..config.server_config import ServerConfig
from ..files.directories import read_regular
from ..files.state_lock import (
    CHECKPOINT_PATTERNS,
    KEPT_WORKERS_NAME,
    STATE_PATTERNS,
    LiveState,
    StartError,
    StateLock,
    created_state_directory,
    keep_private,
    locked_state_directory,
)
from ..routes.services import Services
from ..store import DatabaseUnreachable, Store, open_store
from ..telemetry.open_tracing import opened_tracing
from ..tenants.auth import require_keys
from ..text.hub_names import warn_unresolved
from .app import create_app
from .base_models import download_models, merge_identical_models
from .connections import HttpConnection, disconnect_stalled_clients
from .service_manager import notify, watchdog

logger = logging.getLogger(__name__)

FORCED_STATUS = 130
_FAILED_STATUS = 1
_ANSWER_SECONDS = 1.0
"""Part of the shutdown time that is reserved for answering the requests that cannot be completed."""
_DRAIN_PERIOD_SECONDS = 0.05
_OPEN_FILES = 1 << 16
_GARBAGE_THRESHOLD = 20_000
"""Allocations between two collections; Python's 700 would collect every few requests, which hardly leave cycles."""
_LEAVING_SECONDS = 3.0
"""The time that leftover threads, such as one whose upload hangs, may delay the end of the process."""
_SWITCH_SECONDS = 0.0005
"""The time that a decoder of a large body may hold the GIL; Python's default, 5 ms, is as long as an operation."""


def serve(config: ServerConfig, end_loading: Callable[[], None]) -> None:
    """Runs a server until SIGINT or SIGTERM; a second signal ends the process at once.

    Calls `end_loading` before it says that it is ready.

    Raises StartError, and KeyboardInterrupt on SIGINT before the server was ready.
    """
    check_certificate(config)
    allow_many_connections()
    sys.setswitchinterval(_SWITCH_SECONDS)
    opened = locked_state_directory if config.store.database_url is None else created_state_directory
    # The socket is bound first, so that no state directory is created if the server cannot listen.
    with (
        bound_socket(config.network.host, config.network.port) as listener,
        opened(config.store.state_dir, config.store.durability == "power") as lock,
    ):
        disconnect_stalled_clients(listener)
        keep_private(config.store.state_dir, STATE_PATTERNS)
        if config.checkpoint_storage.checkpoints is not None and not is_url(config.checkpoint_storage.checkpoints):
            keep_private(Path(config.checkpoint_storage.checkpoints).expanduser(), CHECKPOINT_PATTERNS)
        new_loop = uvicorn.Config("", log_config=None).get_loop_factory()
        with asyncio.Runner(loop_factory=new_loop) as runner, bounded_exit():
            runner.run(until_signal(partial(_serve, config, listener, lock, end_loading)))


@contextlib.contextmanager
def bounded_exit() -> Iterator[None]:
    """Limits how long threads that the block leaves behind, which Python would join, delay the end of the process."""
    before, status = set(threading.enumerate()), _FAILED_STATUS
    try:
        yield
        status = 0
    except KeyboardInterrupt:
        status = FORCED_STATUS
        raise
    finally:
        _leave_soon([one for one in threading.enumerate() if one not in before and not one.daemon], status)


def _leave_soon(threads: Sequence[threading.Thread], status: int) -> None:
    def leave() -> None:
        if left := [thread.name for thread in threads if thread.is_alive()]:
            logger.warning("the process ends without waiting for %s", ", ".join(left))
            os._exit(status)

    timer = threading.Timer(_LEAVING_SECONDS, leave)
    timer.daemon = True
    timer.start()


def check_certificate(config: ServerConfig) -> None:
    """Raises StartError if the TLS certificate and key cannot be used."""
    certificate, key = config.network.tls_certificate, config.network.tls_key
    if certificate is None or key is None:
        return
    try:
        # An empty passphrase instead of a prompt, which no one would answer.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, lambda: "")
    except OSError as error:  # SSLError is one
        raise StartError(
            f"certificate {certificate} with key {key} cannot be used ({error}): give a "
            "certificate and its key in PEM, readable and without a passphrase"
        ) from None


def allow_many_connections() -> None:
    """Raises the limit of open files, commonly 1024, since each waiting client holds a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS may refuse the hard limit that it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(
    config: ServerConfig,
    listener: socket.socket,
    lock: StateLock | None,
    end_loading: Callable[[], None],
    on_ready: Callable[[], None],
) -> None:
    config = await download_models(config, say)
    url = url_of(config.network.host, listener, "http" if config.network.tls_certificate is None else "https")
    has_keys = await _has_keys(config)
    with ready_file(config.process.ready_file) as write_ready, watchdog():

        def announce(words: str) -> None:
            end_loading()
            for warning in warn_unresolved(config.models.base_models, config.is_loopback):
                logger.warning("%s", warning)
            on_ready()
            write_ready(url)
            notify("READY=1", f"STATUS={words.splitlines()[0]}")
            say(words)

        if lock is not None:
            async with leading(config, LiveState(config.store.state_dir, lock.check)) as app:
                greet = partial(announce, greeting(config, url, has_keys))
                await HttpServer(config, app, lambda: app.state.services, greet).run_until_cancelled(listener)
        else:
            host = HOST_NAMES.get(config.network.host, config.network.host)
            advertised = url_of(host, listener, url.partition(":")[0])
            serve_shared = plugin_rows("server.replication.rows", "SERVERS").get("shared", _refuse_shared)
            await serve_shared(config, listener, advertised, partial(greeting, config, url, has_keys), announce)


@contextlib.asynccontextmanager
async def leading(config: ServerConfig, live: LiveState) -> AsyncIterator[FastAPI]:
    """Loads the models and runs the application for the duration of the block. Raises StartError."""
    kept = kept_workers(config, None if live.lease is None else live.lease.epoch)
    workers = _loaded_workers(config.with_options(state_dir=live.directory), kept)
    async with opened_tracing(os.environ) as tracing, workers as dispatch:
        if live.lease is not None:  # it may have expired while models were loaded
            live.guard()
        app = create_app(config, dispatch, live, tracing)
        async with app.router.lifespan_context(app):
            # Everything loaded so far stays alive, and scanning it again would make garbage collections slow.
            gc.collect()
            gc.freeze()
            gc.set_threshold(_GARBAGE_THRESHOLD)
            try:
                yield app
            finally:
                gc.unfreeze()


_BIND_REMEDIES = {
    errno.EADDRINUSE: "something listens there already: stop it, or choose another --port (0 picks a free one)",
    errno.EACCES: "that needs root privileges: choose a --port above 1023",
    errno.EADDRNOTAVAIL: "this machine has no such address: choose another --host",
}


@contextlib.contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Yields a socket that is bound but not listening: clients are refused, not kept waiting, while models load.

    Raises StartError if the address cannot be bound.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise StartError(f"host {host!r} cannot be resolved ({error.strerror}): choose another --host") from None
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            remedy = _BIND_REMEDIES.get(error.errno or 0, str(error.strerror))
            raise StartError(f"cannot listen on {host} port {port}: {remedy}") from None
        yield listener


HOST_NAMES: Mapping[str, str] = dict.fromkeys(("0.0.0.0", "::"), socket.gethostname())
"""Maps wildcard addresses to the name under which other machines may reach this one."""


def url_of(host: str, listener: socket.socket, scheme: str) -> str:
    """Returns a URL at which a client on this machine reaches the server."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{f'[{reachable}]' if ':' in reachable else reachable}:{listener.getsockname()[1]}"


def greeting(config: ServerConfig, url: str, has_keys: bool) -> str:
    """Returns the ready message: the URL, and lines to paste into a shell and into Python."""
    key = "tml-..." if has_keys else "tml-local"
    console = plugin_rows("server.console.paths", "PLACES").get("home")
    shown = f"{url}{console} shows runs in a browser, {url}/docs the API" if console else f"{url}/docs shows the API"
    origin = "a key of `trainhouse keys create NAME`" if has_keys else "any key that starts with tml-"
    return "\n".join(
        (
            f"ready: {url} serves {', '.join(model.name for model in config.models.base_models)}",
            f"  {shown}",
            f"  export TINKER_BASE_URL={url} TINKER_API_KEY={key}   # {origin}",
            f'  client = trainhouse.ServiceClient("{url}", "{key}")',
        )
    )


def say(words: str) -> None:
    """Prints to standard output; ignores errors, since that may be a file on a full disk."""
    with contextlib.suppress(OSError):
        print(words, flush=True)


@contextlib.contextmanager
def ready_file(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes the URL to the file atomically, once; removes the file at the end of the block.

    The function raises StartError.
    """
    is_written = False

    def write(url: str) -> None:
        nonlocal is_written
        if path is not None and not is_written:
            aside = path.with_name(f"{path.name}.{os.getpid()}")
            try:
                aside.write_text(f"{url}\n")
                aside.chmod(0o644)  # processes of any user may wait for it
                aside.replace(path)
            except OSError as error:
                raise StartError(f"ready file {path} cannot be written: {error.strerror}") from None
            is_written = True

    try:
        yield write
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


async def _has_keys(config: ServerConfig) -> bool:
    """True if any API key exists. Raises StartError if the server needs one and none exists."""
    store = opened_store(config)
    try:
        await store.check_integrity()
        await require_keys(config, store)
        return (await store.keys.count()).created > 0
    except ValueError as error:
        raise StartError(str(error)) from None
    finally:
        store.close()


def opened_store(config: ServerConfig) -> Store:
    """Raises StartError."""
    try:
        return open_store(config.store)
    except (ValueError, DatabaseUnreachable) as error:
        raise StartError(str(error)) from None


def kept_workers(config: ServerConfig, epoch: int | None) -> KeptWorkers | None:
    """Returns the workers on Ray that outlive the servers of the state directory; None if they end with their server.

    Args:
        epoch: of the server's lease, if it has one.
    Raises:
        StartError: the state directory cannot be used.
    """
    file = config.store.state_dir.absolute() / KEPT_WORKERS_NAME
    try:
        if not config.ranks.keep_workers_seconds:
            file.unlink(missing_ok=True)
            return None
        if not file.exists():
            aside = file.with_name(f"{file.name}.new")
            aside.write_text(secrets.token_hex(16))
            aside.replace(file)
        state_id = read_regular(file).decode()
    except OSError as error:
        raise StartError(f"{file} cannot be used: {error.strerror}") from None
    return KeptWorkers(str(file), state_id, config.ranks.keep_workers_seconds, secrets.token_hex(8), epoch)


async def _refuse_shared(*_: object) -> None:
    raise StartError("--database-url needs server/replication, which this installation lacks: leave out the option")


def _refuse_auto(config: ServerConfig, settings: DispatchConfig, say: Callable[[str], None]) -> DispatchConfig:
    flag = "--parallel" if config.ranks.parallel is None else "--sampler-parallel"
    raise ValueError(
        f"{flag} auto needs the planner, and this installation is without its folders, workers/planner and "
        f"server/planning: name a layout, such as {flag} tp=2"
    )


@contextlib.asynccontextmanager
async def _loaded_workers(config: ServerConfig, kept: KeptWorkers | None) -> AsyncIterator[WorkerDispatch]:
    """Yields a dispatch to loaded workers; at the end, stops them, except kept workers. Raises StartError."""
    try:
        settings = replace(merge_identical_models(config.dispatch_config()), kept=kept)
        if config.ranks.parallel is None or config.sampling.sampler_parallel is None:
            with_layouts = plugin_rows("server.planning.rows", "LAYOUT_CHOICES").get("auto", _refuse_auto)
            settings = with_layouts(config, settings, say)
        dispatch = WorkerDispatch(settings)
        await dispatch.start(say)
    except (ValueError, OSError, OperationError) as error:
        raise StartError(str(error)) from None
    try:
        yield dispatch
    finally:
        await dispatch.close()


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to us, reports when it listens, and answers waiting polls at shutdown.

    services: returns the present services, or None on a standby.
    """

    def __init__(
        self,
        config: ServerConfig,
        app: ASGIApp,
        services: Callable[[], Services | None],
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpConnection,
                lifespan="off",  # entered by us, so that what fails in it reaches our caller
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                timeout_keep_alive=config.network.keep_alive_seconds,
                ssl_certfile=config.network.tls_certificate,
                ssl_keyfile=config.network.tls_key,
                timeout_graceful_shutdown=config.process.shutdown_seconds,
            )
        )
        self._on_ready = on_ready
        self._services = services
        self._drain_seconds = config.process.drain_seconds
        self._sampling_seconds = max(0.0, config.process.shutdown_seconds - _ANSWER_SECONDS)

    async def run_until_cancelled(self, listener: socket.socket) -> None:
        """Serves until cancelled, then drains accepted work and lets open requests end."""
        serving = asyncio.ensure_future(self.serve([listener]))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            if (services := self._services()) is None:
                say("stopping")
            else:
                say("stopping: finishing accepted work and open requests")
                await drain(services, self._drain_seconds)
            self.should_exit = True
            await serving
            raise

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        services = self._services()
        if services is None:
            await super().shutdown(sockets)
            return
        # uvicorn closes the listeners and idle connections before its first await, so no client polls again.
        asyncio.get_running_loop().call_soon(services.futures.long_polls.stop)
        # uvicorn cuts connections at its timeout; samples are stopped before, so that their clients are answered.
        stopping = asyncio.get_running_loop().call_later(self._sampling_seconds, services.sampling.stop_sample_now)
        try:
            await super().shutdown(sockets)
        finally:
            stopping.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def drain(services: Services, seconds: float) -> None:
    """Refuses new work; returns when all accepted work is done and all runs have snapshots, or after `seconds`.

    Work that does not finish is not lost: the next process recovers it from the journal.
    """
    services.quotas.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while services.runs.is_busy or services.samplers.is_busy:  # noqa: ASYNC110
                await asyncio.sleep(_DRAIN_PERIOD_SECONDS)
            await services.runs.snapshot()
            return
    logger.info("work that is not finished after %g s is left to the next start", seconds)


async def until_signal(new_work: Callable[[Callable[[], None]], Coroutine[object, object, None]]) -> None:
    """Runs the work until it ends or a signal cancels it; a second signal ends the process at once.

    Args:
        new_work: starts the work; receives a function that the work calls when it is ready.
    Raises:
        KeyboardInterrupt: SIGINT arrived before the work was ready.
    """
    signals: list[signal.Signals] = []
    ready = asyncio.Event()
    task = asyncio.ensure_future(new_work(ready.set))

    def stop(number: signal.Signals) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(FORCED_STATUS)  # the workers watch their parent and end with it
        notify("STOPPING=1")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not signals:
            raise
        if signals[0] == signal.SIGINT and not ready.is_set():
            raise KeyboardInterrupt from None

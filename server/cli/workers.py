"""`trainhouse workers`: a process that starts ranks and keeps them running while servers attach and detach."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ...workers.pools.remote.secure_channel import read_secret
from ...workers.protocol.worker_config import DispatchConfig, SamplingConfig
from ...workers.scheduler.pool_factory import PoolFactory, groups_of, pool_factory_of
from ...workers.scheduler.worker_daemon import KeptGroup, WorkerDaemon
from ..config.server_config import ServerConfig
from ..replication.attach import knobs_of_workers
from ..replication.state_lock import StartError
from ..serving.auto_layout import with_one_layout
from ..serving.base_models import download_models
from ..serving.server_process import allow_many_connections, bound_socket, bounded_exit, ready_file, say, until_signal

_WAITING = 1024
"""Length of the listener's accept queue; beyond it, the system makes clients retry."""


def run_daemon(config: ServerConfig, listen: str) -> None:
    """Keeps workers until SIGINT or SIGTERM; a second signal ends the process at once. Raises StartError.

    Args:
        listen: HOST:PORT; port 0 picks a free port.
    """
    if config.attach.workers_secret_file is None:
        raise StartError(
            "--workers-secret-file is not given: make one with `openssl rand -hex 32` and give it to servers too"
        )
    allow_many_connections()
    host, _, port = listen.rpartition(":")
    try:
        secret = read_secret(config.attach.workers_secret_file)
    except ValueError as error:
        raise StartError(str(error)) from None
    with bound_socket(host.strip("[]"), int(port), "--listen", "--listen") as listener:
        listener.listen(_WAITING)
        listener.setblocking(False)
        with bounded_exit():
            asyncio.run(until_signal(partial(_keep, config, secret, listener)))


async def _keep(config: ServerConfig, secret: bytes, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    config = await _settled(await download_models(config, say))
    host, port, *_ = listener.getsockname()
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    of_all = _rank_config(config)
    source = pool_factory_of(of_all)
    groups = {name: KeptGroup(name, model, partial(source.new_pool, name, model)) for name, model in groups_of(of_all)}
    keeper = WorkerDaemon(groups, knobs_of_workers(config), secret)
    with ready_file(config.process.ready_file) as write_ready:
        receiving = asyncio.create_task(keeper.serve(listener))
        try:
            await _started(source, keeper)
            on_ready()
            write_ready(address)
            say(f"ready: workers at {address} for `trainhouse serve --workers {address}`")
            await receiving
        finally:
            receiving.cancel()
            await asyncio.wait({receiving})
            await keeper.close()
            await source.close()


async def _settled(config: ServerConfig) -> ServerConfig:
    """Returns the config with the layout of --parallel auto. Raises StartError."""
    try:
        return await asyncio.to_thread(with_one_layout, config, say)
    except ValueError as error:
        raise StartError(str(error)) from None


async def _started(source: PoolFactory, keeper: WorkerDaemon) -> None:
    try:
        await source.open()
        await keeper.start(say)
    except (ValueError, OSError) as error:
        raise StartError(str(error)) from None


def _rank_config(config: ServerConfig) -> DispatchConfig:
    """Returns the part of the config that concerns ranks; directories and all else are up to the servers."""
    of_all = config.dispatch_config()
    models = tuple(replace(model, page_directory=None, shared_directories=()) for model in of_all.models)
    sampling = SamplingConfig() if config.sampling.sampler == "vllm" else of_all.sampling
    return replace(of_all, models=models, sampling=sampling, shared_devices="together")

"""RayCluster: where RayPools have their actors: a cluster of others, or a small one of our own on this machine."""

import asyncio
import contextlib
import logging
import math
import multiprocessing.util
import os
import secrets
import signal
import socket
import sys
import threading

from ..children import Child, ignore_signals, kill_on_hang_up

logger = logging.getLogger(__name__)


class RayCluster:
    """A Ray cluster on which RayPools have their actors, between `connect` and `disconnect`.

    address: of an existing one ("auto", "host:6379", "ray://..."); None starts a small one on this machine, and another
    one when a process of it ends.
    """

    def __init__(self, address: str | None = None, object_store_bytes: int = 256 << 20) -> None:
        self.address = address or ""
        self.environment = _ray_environment(address)
        self._is_ours = address is None
        self._object_store_bytes = object_store_bytes
        self._holder: Child | None = None
        self._keeper: threading.Thread | None = None
        self._stopping = threading.Event()

    async def connect(self, num_cpus: float) -> None:
        """num_cpus: what a cluster of our own must offer. Raises ValueError when that does not start."""
        if self._is_ours:
            await asyncio.to_thread(self._start, math.ceil(num_cpus))
            self._keeper = threading.Thread(target=self._keep, args=(math.ceil(num_cpus),), daemon=True)
            self._keeper.start()

    async def disconnect(self) -> None:
        if self._keeper is not None and self._holder is not None:
            self._stopping.set()
            self._holder.let_go()
            await asyncio.to_thread(self._keeper.join)

    def _start(self, num_cpus: int) -> None:
        directory = multiprocessing.util.get_temp_dir()
        self._holder = Child((), _hold_cluster, self.environment, num_cpus, self._object_store_bytes, directory)
        self.address = self._holder.first_words().decode()
        if not self.address:
            self._holder.process.join()
            reason = self._holder.reason
            self._end_others(self._holder)
            raise ValueError(
                f"no Ray cluster could be started on this machine: {reason}; start one with `ray start --head` and name"
                " it with --ray-address, or serve with --pool local, which needs none"
            )

    def _keep(self, num_cpus: int) -> None:
        while True:
            assert self._holder is not None, "started before this thread"
            self._holder.process.join()
            self._end_others(self._holder)
            if self._stopping.wait(1):
                return
            logger.error("a process of the Ray cluster on this machine ended: another cluster is started")
            try:
                self._start(num_cpus)
            except ValueError as error:  # its end is waited for above
                logger.error("%s", error)
            if self._stopping.is_set():  # `disconnect` has let go of the one before
                self._holder.let_go()

    def _end_others(self, holder: Child) -> None:
        """That it had started, once it has ended."""
        with contextlib.suppress(ProcessLookupError):  # none of them outlived the holder
            os.killpg(holder.process.pid, signal.SIGKILL)
        holder.let_go()


def _ray_environment(address: str | None) -> dict[str, str]:
    """Of the processes that import Ray, which reads it then."""
    environment = {"RAY_USAGE_STATS_ENABLED": "0"}
    if address is not None:
        # Forked processes have the environment of when the forkserver was started.
        environment |= {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
    else:
        # Otherwise Ray leaves one in the user's home.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    if address is None or address.startswith("127."):
        # An open Ray port runs anyone's code, so a cluster of our own stays on loopback (Ray's switch for it is named
        # after the systems on which it is the default).
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return environment


def _hold_cluster(
    pipe: socket.socket,
    lifeline: socket.socket,
    environment: dict[str, str],
    num_cpus: int,
    object_store_bytes: int,
    directory: str,
) -> None:
    """Tells the address, or at its end why there is none. The cluster ends with the first of its processes that ends.

    Ray's own way, processes that end with those that started them, leaves its agents for a minute, in which they want
    to tell a head that is gone that their raylet is. So all that it starts here is one process group, and ends as one;
    but for the actors, each a group of its own, which end without their raylet.
    """
    os.setpgid(0, 0)
    if sys.platform == "linux":
        kill_on_hang_up(lifeline, -os.getpid())
    os.environ.update(environment)
    try:
        address = _started_cluster(num_cpus, object_store_bytes, directory)
    except Exception as error:
        lifeline.sendall(" ".join(f"{type(error).__name__}: {error}".split()).encode())
        return
    ignore_signals()
    pipe.sendall(address.encode())
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)


def _started_cluster(num_cpus: int, object_store_bytes: int, directory: str) -> str:
    """Its address."""
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=object_store_bytes,
        _temp_dir=directory,
    )
    return ray.get_runtime_context().gcs_address

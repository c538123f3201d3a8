"""Provides the Ray cluster for RayPools: an existing one, or a small one started on this machine."""

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

from ..children import Child, child_process, ignore_signals, kill_on_hang_up

logger = logging.getLogger(__name__)


class RayCluster:
    """A Ray cluster on which RayPools place their actors, between `connect` and `disconnect`.

    address: of an existing cluster ("auto", "host:6379", "ray://..."); None starts a small one on this machine, and
        replaces it when one of its processes ends.
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
        """Starts the cluster on this machine, if it is ours.

        Args:
            num_cpus: CPUs that it must offer.
        Raises:
            ValueError: it does not start.
        """
        if self._is_ours:
            await asyncio.to_thread(self._start, math.ceil(num_cpus))
            self._keeper = threading.Thread(target=self._keep, args=(math.ceil(num_cpus),), daemon=True)
            self._keeper.start()

    async def disconnect(self) -> None:
        if self._keeper is not None and self._holder is not None:
            self._stopping.set()
            self._holder.disconnect()
            await asyncio.to_thread(self._keeper.join)

    def _start(self, num_cpus: int) -> None:
        directory = multiprocessing.util.get_temp_dir()
        self._holder = Child((), _hold_cluster, self.environment, num_cpus, self._object_store_bytes, directory)
        self.address = self._holder.read_first_message().decode()
        if not self.address:
            self._holder.process.join()
            reason = self._holder.reason
            self._kill_process_group(self._holder)
            raise ValueError(
                f"no Ray cluster could be started on this machine: {reason}; start one with `ray start --head` and name"
                " it with --ray-address, or serve with --pool local, which needs none"
            )

    def _keep(self, num_cpus: int) -> None:
        while True:
            assert self._holder is not None, "started before this thread"
            self._holder.process.join()
            self._kill_process_group(self._holder)
            if self._stopping.wait(1):
                return
            logger.error("a process of the Ray cluster on this machine ended: starting a new cluster")
            try:
                self._start(num_cpus)
            except ValueError as error:  # its holder has exited, which the loop waits for
                logger.error("%s", error)
            if self._stopping.is_set():  # `disconnect` has released the previous holder
                self._holder.disconnect()

    def _kill_process_group(self, holder: Child) -> None:
        """Kills what the holder had started, after its exit."""
        with contextlib.suppress(ProcessLookupError):  # none of them outlived the holder
            os.killpg(holder.process.pid, signal.SIGKILL)
        holder.disconnect()


def _ray_environment(address: str | None) -> dict[str, str]:
    """Returns environment variables for processes that import Ray, which reads them at import."""
    environment = {"RAY_USAGE_STATS_ENABLED": "0"}
    if address is not None:
        # Forked processes inherit the environment as it was when the forkserver started.
        environment |= {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
    else:
        # Otherwise Ray leaves a token file in the user's home directory.
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
    """Starts the cluster and sends its address, or at exit the reason why it failed; exits when any process of it does.

    Ray's own way, in which processes end with their parent, leaves its agents running for a minute, trying to report to
    a head that is gone. Therefore everything started here is one process group and is killed as one, except the actors:
    each is a group and ends without its raylet.
    """
    with child_process(lifeline):
        os.setpgid(0, 0)
        if sys.platform == "linux":
            kill_on_hang_up(lifeline, -os.getpid())
        os.environ.update(environment)
        try:
            address = _start_cluster(num_cpus, object_store_bytes, directory)
        except Exception as error:
            lifeline.sendall(" ".join(f"{type(error).__name__}: {error}".split()).encode())
            return
        ignore_signals()
        pipe.sendall(address.encode())
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)


def _start_cluster(num_cpus: int, object_store_bytes: int, directory: str) -> str:
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

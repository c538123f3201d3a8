"""A Ray cluster of several nodes on loopback, each a process group that can be killed and restarted."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

START_SECONDS = 40
HEAD = "127.0.0.2"  # Ray would replace 127.0.0.1 by the machine's external address

_ENVIRONMENT = {
    # Ray refuses a second node without it.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The head notices sooner that a node is gone.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass
class RayNodes:
    """Starts and kills the nodes of a cluster.

    directory: must be short, because Ray creates sockets there.
    environment: variables in addition to those of all tests.
    below: prefix of the command that starts a node.
    """

    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    below: Sequence[str] = ()
    port: int = 0
    running: list[psutil.Process] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{HEAD}:{self.port}"

    def start_head(self, num_cpus: int) -> psutil.Process:
        """Starts the head on the port of the last one, and returns when it is ready."""
        self.port = self.port or free_port()
        options = [f"--port={self.port}", f"--temp-dir={self.directory / str(len(self.running))}"]
        head = self._start("--head", f"--node-ip-address={HEAD}", "--include-dashboard=false", *options, cpus=num_cpus)
        deadline = time.monotonic() + START_SECONDS
        while not is_listening(HEAD, self.port):
            assert head.is_running() and time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        return head

    def start_node(self, num_cpus: int) -> psutil.Process:
        """Starts a node, which joins as soon as it is up."""
        return self._start(
            f"--address={self.address}", f"--node-ip-address=127.0.0.{len(self.running) + 3}", cpus=num_cpus
        )

    def wait_until_joined(self) -> None:
        """Waits until all started nodes have joined; none of them may have been killed."""
        deadline = time.monotonic() + 2 * START_SECONDS
        while self.log().count("Ray runtime started") < len(self.running):
            assert time.monotonic() < deadline, self.log()[-4000:]
            time.sleep(0.1)

    def kill(self, node: psutil.Process) -> None:
        """Kills the node's raylet, actors and other processes, all suspended first so that they die together."""
        processes = [node, *node.children(recursive=True)]
        for send in (psutil.Process.suspend, psutil.Process.kill):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    send(process)
        psutil.wait_procs(processes, timeout=10)

    def actors(self, name: str = "Rank") -> list[psutil.Process]:
        """Returns the processes of our actors whose class has a name that begins so."""
        processes = (each for node in self.running for each in node.children(recursive=True))
        return [each for each in processes if _name_of(each).startswith(f"ray::{name}")]

    def ranks(self) -> list[int]:
        return sorted(each.pid for each in self.actors("RankActor"))

    def log(self) -> str:
        return (self.directory / "nodes.log").read_text(errors="replace")

    def _start(self, *options: str, cpus: int) -> psutil.Process:
        ray = Path(sys.executable).with_name("ray")
        command = [
            *self.below,
            ray,
            "start",
            "--block",
            "--object-store-memory=100000000",
            f"--num-cpus={cpus}",
            *options,
        ]
        with (self.directory / "nodes.log").open("ab") as log:
            node = psutil.Popen(
                command,
                env=os.environ | _ENVIRONMENT | dict(self.environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(node)
        return node


@contextmanager
def ray_nodes(directory: Path, **environment: str) -> Iterator[RayNodes]:
    nodes = RayNodes(directory, environment)
    try:
        yield nodes
    finally:
        for node in nodes.running:
            if node.is_running():
                nodes.kill(node)


@contextmanager
def ray_head(num_cpus: int, below: Sequence[str] = ()) -> Iterator[RayNodes]:
    """A cluster that has only a head."""
    with TemporaryDirectory(prefix="ray") as directory, ray_nodes(Path(directory)) as nodes:  # pytest's is too long
        nodes.below = below
        nodes.start_head(num_cpus)
        yield nodes


def _name_of(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HEAD, 0))
        return listener.getsockname()[1]


def is_listening(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), 0.5):
        return True
    return False

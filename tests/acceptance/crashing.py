"""A server that tests kill, damage and starve while scripts train on it, and what the scripts have in the end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import load_file

from ..live import LiveServer, live_server
from .training_script import MODEL

TOLERANCE = 1e-4
OPTIONS = {"snapshot_steps": 3}

Faults = Mapping[int, Callable[[], None]]
"""By the step of the first tenant that they follow."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def nothing() -> None:
    pass


@dataclass
class Crashing:
    """A server on one port that can be killed and started again, and so can its worker.

    options: as of `live_server`. state_dir: where its state is, if not in `directory` beside its log. module: what is
    run. pids: of all servers so far.
    """

    model: Path
    directory: Path
    options: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)
    state_dir: Path = field(kw_only=True, default=Path())
    module: str = field(kw_only=True, default="trainhouse.server")
    port: int = field(default_factory=free_port)
    pids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state_dir = self.directory / self.state_dir

    @contextmanager
    def running(self) -> Iterator["Crashing"]:
        with ExitStack() as self._stack:
            self._start()
            yield self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._server.log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._server.process.pid

    def signal_worker(self, number: signal.Signals) -> None:
        """All its ranks, as soon as there are any: they may just have died."""
        until(lambda: worker_pids(self.pid))
        for pid in worker_pids(self.pid):
            with suppress(ProcessLookupError):  # one ends with the other
                os.kill(pid, number)

    def signal_rank(self, number: signal.Signals) -> None:
        """The last of them that was started, once there are several."""
        until(lambda: len(worker_pids(self.pid)) > 1)
        with suppress(ProcessLookupError, ValueError):  # they have ended meanwhile
            os.kill(max(worker_pids(self.pid)), number)

    def restart(self, meanwhile: Callable[[], None] = nothing) -> None:
        """After kill -9; `meanwhile` is done while no server runs."""
        self._server.process.kill()
        self._server.process.wait(20)
        self._stack.pop_all().close()
        meanwhile()
        self._start()

    def strike(self, killed: str) -> None:
        """killed: "worker", one "rank" of it, "server" or "both"."""
        if killed in ("worker", "both"):
            self.signal_worker(signal.SIGKILL)
        if killed == "rank":
            self.signal_rank(signal.SIGKILL)
        if killed in ("server", "both"):
            self.restart()

    def _start(self) -> None:
        options = {"port": self.port, "state-dir": self.state_dir} | dict(self.options)
        live = live_server({MODEL: self.model}, self.directory, module=self.module, **options)
        self._server: LiveServer = self._stack.enter_context(live)
        self.pids.append(self.pid)


def worker_pids(server_pid: int) -> list[int]:
    """Of the processes below it those that have torch loaded, but for the forkserver, its own child."""
    below = psutil.Process(server_pid).children(recursive=True)
    return [each.pid for each in below if _is_rank(each, server_pid)]


def _is_rank(process: psutil.Process, server_pid: int) -> bool:
    try:
        return process.ppid() != server_pid and "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text()
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    early: list[float]
    late: list[float]
    weights: dict[str, np.ndarray]


def train(
    crashing: Crashing,
    num_steps: int,
    faults: Faults,
    package: str = "tinker",
    url: str | None = None,
    training: str = "lora",
) -> list[Trained]:
    """Of each tenant. url: another way to the server. training: see training_script."""
    module = "trainhouse.tests.acceptance.training_script"
    arguments = [sys.executable, "-m", module, url or crashing.url, str(num_steps), package, training]
    by_line = {f"step {step}\n": fault for step, fault in faults.items()}
    lines = []
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as script:
        assert script.stdout is not None
        try:
            for line in script.stdout:
                lines.append(line)
                by_line.get(line, nothing)()
        except BaseException:
            script.kill()
            raise
    said = "".join(lines)
    assert script.returncode == 0, said
    assert set(by_line) <= set(lines), said
    return [_trained(crashing.state_dir, each) for each in json.loads(lines[-1])]


def _trained(state_dir: Path, said: dict) -> Trained:
    run_id = said["path"].removeprefix("tinker://").split("/")[0].replace(":", "_")
    (saved,) = (state_dir / "checkpoints" / run_id / "weights").glob("end.*")
    weights = {
        name: each
        for stem in ("adapter_model", "model")
        for path in saved.glob(f"{stem}*.safetensors")
        for name, each in load_file(path).items()
    }
    return Trained(said["losses"], said["early"], said["late"], weights)


def assert_same(found: list[Trained], wanted: list[Trained]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.losses, other.losses, rtol=TOLERANCE)
        np.testing.assert_allclose(one.late, one.early, atol=1e-4)
        np.testing.assert_allclose(one.early, other.early, atol=1e-3)
        for name, weights in other.weights.items():
            np.testing.assert_allclose(one.weights[name], weights, atol=TOLERANCE * max(1, np.abs(weights).max()))

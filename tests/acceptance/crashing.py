"""A server that tests kill, damage and starve while scripts train on it, and the scripts' final results."""

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
"""Keys: the step of the first tenant after which the fault happens."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def do_nothing() -> None:
    pass


@dataclass
class Crashing:
    """A server on a fixed port that can be killed and restarted, and so can its worker.

    options: of `live_server`. state_dir: relative to `directory`, which has the log. module: run with `python -m`.
    pids: of all servers so far.
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
        """Signals all its ranks, after waiting until there are some: they may have just died."""
        until(lambda: worker_pids(self.pid))
        for pid in worker_pids(self.pid):
            with suppress(ProcessLookupError):  # one rank's end may end the others
                os.kill(pid, number)

    def signal_rank(self, number: signal.Signals) -> None:
        """Signals the rank that started last, after waiting until there are several."""
        until(lambda: len(worker_pids(self.pid)) > 1)
        with suppress(ProcessLookupError, ValueError):  # the ranks have just ended
            os.kill(max(worker_pids(self.pid)), number)

    def restart(self, meanwhile: Callable[[], None] = do_nothing) -> None:
        """Kills the server with SIGKILL and starts it again; calls `meanwhile` in between."""
        self._server.process.kill()
        self._server.process.wait(20)
        self._stack.pop_all().close()
        meanwhile()
        self._start()

    def restart_dead(self) -> None:
        """Starts the server again after it has died of itself."""
        assert self._server.process.wait(60) == -signal.SIGKILL
        self.restart()

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
    """Returns the descendants that have torch loaded, except the forkserver, which is a direct child."""
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
        assert time.monotonic() < deadline, f"the condition was not met within {seconds} s"
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
    """Runs the script, and returns the results of each tenant.

    Args:
        url: another address of the server.
        training: see training_script.
    """
    module = "trainhouse.tests.acceptance.training_script"
    arguments = [sys.executable, "-m", module, url or crashing.url, str(num_steps), package, training]
    by_line = {f"step {step}\n": fault for step, fault in faults.items()}
    lines = []
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as script:
        assert script.stdout is not None
        try:
            for line in script.stdout:
                lines.append(line)
                by_line.get(line, do_nothing)()
        except BaseException:
            script.kill()
            raise
    output = "".join(lines)
    assert script.returncode == 0, f"exit status {script.returncode}: {output}"
    assert set(by_line) <= set(lines), output
    return [_trained(crashing.state_dir, each) for each in json.loads(lines[-1])]


def _trained(state_dir: Path, result: dict) -> Trained:
    run_id = result["path"].removeprefix("tinker://").split("/")[0].replace(":", "_")
    (saved,) = (state_dir / "checkpoints" / run_id / "weights").glob("end.*")
    weights = {
        name: each
        for stem in ("adapter_model", "model")
        for path in saved.glob(f"{stem}*.safetensors")
        for name, each in load_file(path).items()
    }
    return Trained(result["losses"], result["early"], result["late"], weights)


def assert_same(found: list[Trained], wanted: list[Trained]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.losses, other.losses, rtol=TOLERANCE)
        np.testing.assert_allclose(one.late, one.early, atol=1e-4)
        np.testing.assert_allclose(one.early, other.early, atol=1e-3)
        for name, weights in other.weights.items():
            np.testing.assert_allclose(one.weights[name], weights, atol=TOLERANCE * max(1, np.abs(weights).max()))

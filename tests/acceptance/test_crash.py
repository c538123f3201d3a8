"""Training scripts go on while workers and the server are killed, and end as if nothing had happened."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ..live import LiveServer, live_server
from .training_script import MODEL

TOLERANCE = 1e-4
SCRIPT_SECONDS = 600
OPTIONS = {"snapshot_steps": 3}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclass
class Crashing:
    """A server on one port that can be killed and started again, and so can its worker."""

    model: Path
    state_dir: Path
    options: Mapping[str, object]
    pool: str = "local"
    port: int = field(default_factory=free_port)

    @contextmanager
    def running(self) -> Iterator["Crashing"]:
        with ExitStack() as self._stack:
            self._start()
            yield self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _kill_worker(self) -> None:
        for pid in worker_pids(self._server.process.pid):
            os.kill(pid, signal.SIGKILL)

    def _kill_server(self) -> None:
        self._server.process.kill()
        self._server.process.wait(20)
        self._stack.pop_all().close()
        self._start()

    def strike(self, killed: str) -> None:
        """killed: "worker", "server" or "both"."""
        if killed in ("worker", "both"):
            self._kill_worker()
        if killed in ("server", "both"):
            self._kill_server()

    def _start(self) -> None:
        live = live_server({MODEL: self.model}, self.state_dir, self.pool, port=self.port, **self.options)
        self._server: LiveServer = self._stack.enter_context(live)


def worker_pids(server_pid: int) -> list[int]:
    """Of its children those that have torch loaded."""
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    return [int(pid) for pid in children if "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()]


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    early: list[float]
    late: list[float]
    weights: dict[str, np.ndarray]


def train(crashing: Crashing, num_steps: int, faults: Mapping[int, Callable[[], None]]) -> list[Trained]:
    """Two tenants at once; a fault strikes as soon as the first has begun that step."""
    scripts = [_script(crashing.url, seed, num_steps) for seed in (1, 2)]
    outputs: list[list[str]] = [[], []]
    readers = [
        threading.Thread(target=_read, args=(script, lines, on_line))
        for script, lines, on_line in zip(scripts, outputs, (_striking(faults), lambda line: None), strict=True)
    ]
    try:
        for reader in readers:
            reader.start()
        for script, reader in zip(scripts, readers, strict=True):
            script.wait(SCRIPT_SECONDS)
            reader.join()
    finally:
        for script in scripts:
            script.kill()
            script.wait(20)
    assert [script.returncode for script in scripts] == [0, 0], outputs
    return [_trained(crashing.state_dir, json.loads(lines[-1])) for lines in outputs]


def _script(url: str, seed: int, num_steps: int) -> subprocess.Popen[str]:
    module = "trainhouse.tests.acceptance.training_script"
    arguments = [sys.executable, "-m", module, url, str(seed), str(num_steps)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _read(script: subprocess.Popen[str], lines: list[str], on_line: Callable[[str], None]) -> None:
    assert script.stdout is not None
    with script.stdout:
        for line in script.stdout:
            lines.append(line)
            on_line(line)


def _striking(faults: Mapping[int, Callable[[], None]]) -> Callable[[str], None]:
    by_line = {f"step {step}\n": fault for step, fault in faults.items()}
    return lambda line: by_line.get(line, lambda: None)()


def _trained(state_dir: Path, said: dict) -> Trained:
    run_id = said["path"].removeprefix("tinker://").split("/")[0].replace(":", "_")
    (saved,) = (state_dir / "checkpoints" / run_id / "weights").glob("end.*")
    return Trained(said["losses"], said["early"], said["late"], load_file(saved / "adapter_model.safetensors"))


def assert_same(found: list[Trained], wanted: list[Trained]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.losses, other.losses, rtol=TOLERANCE)
        np.testing.assert_allclose(one.late, one.early, atol=1e-4)
        np.testing.assert_allclose(one.early, other.early, atol=1e-3)
        for name, weights in other.weights.items():
            np.testing.assert_allclose(one.weights[name], weights, atol=TOLERANCE * max(1, np.abs(weights).max()))


def striking(crashing: Crashing, faults: Mapping[int, str], seed: str) -> Mapping[int, Callable[[], None]]:
    """Each within a tenth of a second."""
    drawn = random.Random(seed)

    def strike(killed: str) -> None:
        time.sleep(drawn.uniform(0, 0.1))
        crashing.strike(killed)

    return {step: partial(strike, killed) for step, killed in faults.items()}


def compare(model: Path, directory: Path, num_steps: int, faults: Mapping[int, str], pool: str = "local") -> None:
    with Crashing(model, directory / "calm", OPTIONS, pool).running() as calm:
        undisturbed = train(calm, num_steps, {})
    with Crashing(model, directory / "crashing", OPTIONS, pool).running() as crashing:
        found = train(crashing, num_steps, striking(crashing, faults, str(faults)))
    assert_same(found, undisturbed)
    with pytest.raises(AssertionError):
        assert_same(found, undisturbed[::-1])


def test_training_scripts_do_not_notice(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    compare(tiny_models["qwen3"], tmp_path, 9, {2: "worker", 6: "both"})


def faults_of(worker: int, server: int, both: int, num_steps: int) -> dict[int, str]:
    """At steps drawn at random."""
    kinds = ["worker"] * worker + ["server"] * server + ["both"] * both
    steps = random.Random(0).sample(range(1, num_steps), len(kinds))
    return dict(zip(sorted(steps), kinds, strict=True))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pool", ["local", "ray"])
def test_thirteen_crashes_in_forty_steps(pool: str, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    compare(tiny_models["qwen3"], tmp_path, 40, faults_of(5, 5, 3, 40), pool)

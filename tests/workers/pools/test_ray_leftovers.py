"""A server leaves no process, port, shared memory or file behind except its state, however it ends."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from trainhouse.tests.live import live_server
from trainhouse.tests.workers.ray_nodes import ray_nodes

SECONDS = 15  # until all must be released

SERVES = """
import asyncio
import sys
from trainhouse.tests.workers.recording_worker import RECORDING
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch

async def main(pool, address=None):
    model = WorkerConfig(ServedModel("tiny", "tiny"), device="cpu")
    dispatch = WorkerDispatch(DispatchConfig((model,), pool=pool, ray_address=address, worker=RECORDING))
    await dispatch.start(lambda _: None)
    print(*dispatch.pids("tiny"), flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass(frozen=True)
class HeldResources:
    """Holds what must be released.

    processes: includes those of Ray that hide their environment behind a title.
    """

    processes: set[psutil.Process]
    ports: set[tuple[str, int]]
    shared_memory: set[Path]

    def remaining(self) -> list[object]:
        processes = [each for each in self.processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        shared_memory = [each for each in self.shared_memory if each.exists()]
        return [*processes, *shared_memory, *(each for each in self.ports if is_listening(*each))]


@dataclass(frozen=True)
class Traces:
    """Finds all processes that inherited this test's mark, what they hold, and the files that they leave.

    files: must be short, because Ray creates sockets there.
    """

    mark: str
    home: Path
    files: Path

    def processes(self) -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if self._is_ours(each)]

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            running = process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
            return running and process.environ().get("TEST_MARK") == self.mark
        return False

    def held(self) -> "HeldResources":
        marked = self.processes()
        processes = {*marked, *(child for each in marked for child in each.children(recursive=True))}
        listening = [each for process in marked for each in process.net_connections() if each.status == "LISTEN"]
        maps = [mapped.path for process in marked for mapped in process.memory_maps()]
        # Shared memory of deleted files ends with its processes.
        shared = [path for path in maps if path.startswith("/dev/shm/") and not path.endswith("(deleted)")]
        ports = {(each.laddr.ip.removeprefix("::ffff:"), each.laddr.port) for each in listening}
        return HeldResources(processes, ports, {Path(path) for path in shared})

    def left_files(self) -> list[Path]:
        """Returns all files but caches, which stay."""
        return [*self.files.iterdir(), *(each for each in self.home.iterdir() if each.name != ".cache")]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Traces]:
    files, home = Path(tempfile.mkdtemp(prefix="th")), tmp_path / "home"
    home.mkdir()
    marked_traces = Traces(uuid.uuid4().hex, home, files)
    for name, value in {"TEST_MARK": marked_traces.mark, "TMPDIR": str(files), "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    yield marked_traces
    for process in marked_traces.processes():
        process.kill()
    shutil.rmtree(files, ignore_errors=True)


@contextmanager
def serving(*arguments: str) -> Iterator[list[int]]:
    """Yields the process ids of a server's workers, and kills the server at the end."""
    with subprocess.Popen([sys.executable, "-c", SERVES, *arguments], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield [int(pid) for pid in server.stdout.readline().split()]
        finally:
            server.kill()


def assert_released(traces: Traces, held: HeldResources) -> None:
    deadline = time.monotonic() + SECONDS
    while (remaining := [*traces.processes(), *traces.left_files(), *held.remaining()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert remaining == []


def is_listening(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


@pytest.mark.parametrize("pool", ["local", pytest.param("ray", marks=pytest.mark.full)])
def test_workers_of_a_killed_server_leave_nothing(pool: str, traces: Traces) -> None:
    with serving(pool) as pids:
        assert pids
        held = traces.held()
        assert len(held.processes) >= 3 and traces.left_files()
        assert {host for host, _ in held.ports} == ({"127.0.0.1"} if pool == "ray" else set())
    assert_released(traces, held)


@pytest.mark.full
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("pool", ["local", "ray"])
def test_ended_server_leaves_only_its_state(
    pool: str, ending: signal.Signals, traces: Traces, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with live_server({"tiny/chat": tiny_models["llama"]}, tmp_path / "state", pool=pool) as server:
        held = traces.held()
        assert held.ports and traces.left_files()
        server.process.send_signal(ending)
        assert server.process.wait(30) == (0 if ending == signal.SIGTERM else -ending)
    assert_released(traces, held)


@pytest.mark.full
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_shared_cluster_gets_its_place_back(ending: signal.Signals, traces: Traces, tmp_path: Path) -> None:
    """SIGSTOP is sent to the actor before its server is killed."""
    directory = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    with ray_nodes(directory) as nodes:
        head = nodes.start_head(num_cpus=1)
        for _ in range(2):  # the second finds the only place free
            with serving("ray", nodes.address) as [pid]:
                actor = psutil.Process(pid)
                assert actor in head.children(recursive=True)
                if ending == signal.SIGSTOP:
                    actor.suspend()
            psutil.wait_procs([actor], SECONDS)
            assert not actor.is_running()
    shutil.rmtree(directory)

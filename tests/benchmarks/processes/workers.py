"""Workers that measure themselves. Pools load them by name."""

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trainhouse.workers.models.loading import resolve_device
from trainhouse.workers.parallel.mesh import Mesh, PendingCollective, Team
from trainhouse.workers.protocol.calls import PartAnswer, Pass
from trainhouse.workers.worker.worker import Worker

from ...workers.parallel.live_bytes import LiveBytes
from ...workers.parallel.probe_worker import ProbeWorker
from ..harness import running
from . import probes


class TimedWorker(Worker):
    def time_passes(self, parts: Pass, num_passes: int, pause_seconds: float) -> list[float]:
        """Returns the seconds of each pass, in the process that serves it; others can use the caches in the pauses."""
        times = []
        for _ in range(num_passes):
            time.sleep(pause_seconds)
            started = time.perf_counter()
            self.run_pass(parts)
            times.append(time.perf_counter() - started)
        return times


@dataclass(frozen=True)
class Clocks:
    """Seconds since the first reading: in exchanges, and of CPU in all threads of the rank."""

    exchanging: float
    cpu: float


class ExchangeClock:
    """Clocks a rank's exchanges with others, including the time that it waits for them.

    While it computes during an exchange, only the wait at the end counts.
    """

    # None of them calls another one.
    _EXCHANGES = (
        *((Team, each) for each in (Team.all_reduce, Team.start_all_gather, Team.reduce_scatter, Team.all_to_all)),
        *((Team, each) for each in (Team.start_ring_shift, Team.broadcast)),
        (PendingCollective, PendingCollective.wait),
        (Mesh, Mesh.all_gather_object),
    )

    def __init__(self, _: ProbeWorker) -> None:
        self._exchange_seconds = 0.0
        for owner, exchange in self._EXCHANGES:
            setattr(owner, exchange.__name__, self._clocked(exchange))

    def read(self) -> Clocks:
        return Clocks(self._exchange_seconds, time.process_time())

    def _clocked(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return exchange(*arguments, **named)
            finally:
                self._exchange_seconds += time.perf_counter() - started

        return clocked


@dataclass(frozen=True)
class Cost:
    """growth: bytes of resident memory, at most, above what the process had after its first pass. seconds: of the
    pass."""

    growth: int
    seconds: float


class PeakWorker(Worker):
    """Measures passes; the first one warms up.

    The allocator keeps what a pass took, so the passes of a process must grow for their peaks to mean something.
    """

    _baseline = 0

    def run_pass(self, parts: Pass) -> tuple[PartAnswer, ...]:
        started = time.perf_counter()
        answers = super().run_pass(parts)
        seconds = time.perf_counter() - started
        if not self._baseline:
            self._baseline = probes.resident_bytes()
            probes.restart_peak()
        self._cost = Cost(probes.peak_bytes() - self._baseline, seconds)
        return answers

    def pass_cost(self) -> Cost:
        """Returns that of the last pass."""
        return self._cost


@dataclass(frozen=True)
class MeteredPass:
    """growth: bytes of the device, at most, above those before the pass. tensors: bytes that it made, at most at a
    time."""

    growth: int
    tensors: int


@dataclass(frozen=True)
class Loading:
    """mapped: bytes of the model's files in memory, which processes that map them share and the system can reclaim."""

    growth: int
    mapped: int


class HostMeter:
    """Measures memory that no file backs. What the allocator kept of earlier work is returned first."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", probes.__file__, "memory", str(os.getpid())]
        self._held = ExitStack()  # until this process ends
        self._probe = self._held.enter_context(running(command))

    def begin(self) -> None:
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)
        _, self._before = self._probe.ask("begin")

    def growth(self) -> int:
        most, _ = self._probe.ask("end")
        return most - self._before


class CudaMeter:
    """Measures tensors as torch counts them."""

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def growth(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before


class MeteredWorker(Worker):
    """Measures the memory of its device while it loads and during passes."""

    def _load(self, mesh: Mesh) -> None:
        self._is_cuda = resolve_device(self._config).type == "cuda"
        self._meter = CudaMeter() if self._is_cuda else HostMeter()
        self._meter.begin()
        super()._load(mesh)
        self._loading = Loading(self._meter.growth(), _mapped_bytes(Path(self._config.model.source)))

    def run_pass(self, parts: Pass) -> tuple[PartAnswer, ...]:
        self._meter.begin()
        with nullcontext() if self._is_cuda else LiveBytes() as live:
            answers = super().run_pass(parts)
        growth = self._meter.growth()
        self._pass = MeteredPass(growth, growth if live is None else live.peak)
        return answers

    def loading(self) -> Loading:
        return self._loading

    def metered_pass(self) -> MeteredPass:
        """Returns the last one."""
        return self._pass


def _mapped_bytes(directory: Path) -> int:
    """Returns the resident bytes of this directory's files in this process, see proc(5)."""
    num_bytes, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *_ = line.split()
        if not first.endswith(":"):
            is_inside = f" {directory}/" in line
        elif is_inside and first == "Rss:":
            num_bytes += 1024 * int(line.split()[1])
    return num_bytes


# By the name under which a worker's process can import this module: tests can import it by another one.
TIMED, PEAK, METERED = (
    f"trainhouse.tests.benchmarks.processes.workers:{worker.__name__}"
    for worker in (TimedWorker, PeakWorker, MeteredWorker)
)

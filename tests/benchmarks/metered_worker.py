"""A worker that meters the memory of its device: what loading takes of it, and what passes take."""

import ctypes
import platform
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from trainhouse.workers.models.model import resolve_device
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.protocol.verbs import Pass
from trainhouse.workers.training.progress import Answer
from trainhouse.workers.worker.worker import Worker

from ..workers.parallel.live_bytes import LiveBytes
from . import memory_watch
from .child import running


@dataclass(frozen=True)
class Metered:
    """Bytes of a device that were taken before something ran, at most while it did, and after it."""

    before: int
    most: int
    after: int

    @property
    def growth(self) -> int:
        return self.most - self.before


@dataclass(frozen=True)
class MeteredPass:
    """tensors: bytes of those that it made, at most at a time."""

    taken: Metered
    tensors: int


@dataclass(frozen=True)
class Loading:
    """mapped: bytes of the model's files that lie in memory; those who map the same ones share them, and the system
    takes them back when it wants to."""

    taken: Metered
    mapped: int


class HostMeter:
    """Of what no file is behind. What the allocator kept of earlier work is given back before."""

    def __init__(self) -> None:
        self._held = ExitStack()  # as long as this process is there
        self._watch = self._held.enter_context(running([sys.executable, "-I", "-S", memory_watch.__file__]))
        self._before = 0

    def begin(self) -> None:
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)
        _, self._before = self._watch.ask("begin")

    def end(self) -> Metered:
        most, now = self._watch.ask("end")
        return Metered(self._before, most, now)


class CudaMeter:
    """Of tensors, as torch counts them."""

    def __init__(self) -> None:
        self._before = 0

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def end(self) -> Metered:
        return Metered(self._before, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())


class MeteredWorker(Worker):
    def _load(self, mesh: Mesh) -> None:
        self._is_cuda = resolve_device(self._config).type == "cuda"
        self._meter = CudaMeter() if self._is_cuda else HostMeter()
        self._meter.begin()
        super()._load(mesh)
        self._loading = Loading(self._meter.end(), _mapped_bytes(Path(self._config.model.source)))

    def run_pass(self, work: Pass) -> tuple[Answer, ...]:
        self._meter.begin()
        with nullcontext() if self._is_cuda else LiveBytes() as live:
            answers = super().run_pass(work)
        taken = self._meter.end()
        self._pass = MeteredPass(taken, taken.growth if live is None else live.peak)
        return answers

    def loading(self) -> Loading:
        return self._loading

    def metered_pass(self) -> MeteredPass:
        """The last one."""
        return self._pass


def _mapped_bytes(directory: Path) -> int:
    """Of files in this directory, by this process; see proc(5)."""
    num_bytes, is_own = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *_ = line.split()
        if not first.endswith(":"):
            is_own = f" {directory}/" in line
        elif is_own and first == "Rss:":
            num_bytes += 1024 * int(line.split()[1])
    return num_bytes


METERED = f"{__name__}:{MeteredWorker.__name__}"

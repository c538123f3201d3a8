"""The memory and devices of this machine, their measured speeds, and the share of that speed that recent work used.

Imports no torch.
"""

import os
import re
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from ...schemas.models import Utilization
from ..protocol.worker_config import WorkerConfig

Kind = Literal["training", "sampling"]

# The passes or slices that count as recent.
_NUM_RECENT = 64

_DEVICES = Path("/dev")


def available_bytes() -> int | None:
    """Returns how much memory this process may still use, of the machine's or the container's limit; None if
    unknown."""
    limits = list(available_to(Path("/sys/fs/cgroup")))
    machine = Path("/proc/meminfo")
    if machine.exists():
        fields = dict(line.split(":", 1) for line in machine.read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    return min(limits, default=None)


def available_to(container: Path) -> Iterator[int]:
    """Yields what is left of a cgroup's memory limit (version 2), if it has one.

    Linux counts the page cache as used, but frees it when memory is needed.
    """
    limit, used, statistics = (container / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        fields = dict(line.split() for line in statistics.read_text().splitlines())
        cache = int(fields["active_file"]) + int(fields["inactive_file"])
        yield int(limit.read_text()) - int(used.read_text()) + cache


def cuda_devices() -> int | None:
    """Returns the number of CUDA devices that a process may use, None if it may use none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")]) or None
    return len(_device_files()) or None


def _device_files() -> list[Path]:
    return [file for file in _DEVICES.glob("nvidia[0-9]*") if file.name[6:].isdigit()]


def runs_on_cpu(model: WorkerConfig) -> bool:
    """Guesses without torch: a worker with the device "auto" uses CUDA if the machine has it."""
    if model.device == "auto":
        return cuda_devices() is None or not _device_files()
    return model.device.startswith("cpu")


def loaded_dtype(model: WorkerConfig) -> str:
    if model.dtype != "auto":
        return model.dtype
    return "float32" if runs_on_cpu(model) else "bfloat16"


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def keep_rate(name: str, rate: float) -> None:
    """Stores a device's measured rate of large products in 16 bits, in operations per second, for later plans.

    Does nothing if the user's cache cannot be written.
    """
    file = _file_of(name)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first, because other ranks may write it at the same time.
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            (made := Path(scratch) / file.name).write_text(f"{rate:.6g}\n")
            made.replace(file)


def measured_rate(name: str) -> float | None:
    """Returns the rate that a worker of this user has kept, None if there is none."""
    try:
        rate = float(_file_of(name).read_text())
    except (OSError, ValueError):
        return None
    return rate if 0 < rate < float("inf") else None


def _file_of(name: str) -> Path:
    return cache_directory() / "product-rates" / re.sub(r"[^A-Za-z0-9]+", "-", name)


class DeviceSpeed:
    """Records the operations of passes and slices, and the seconds that they took.

    peak: operations per second of a large product, on the devices of all ranks together.
    """

    def __init__(self, peak: float) -> None:
        self.peak = peak
        self._recent = {kind: deque[tuple[float, float]](maxlen=_NUM_RECENT) for kind in get_args(Kind)}

    def record(self, kind: Kind, flops: float, seconds: float) -> None:
        self._recent[kind].append((flops, seconds))

    def utilization(self) -> Utilization:
        """Returns the part of the peak that recent work of each kind has reached, None before the first."""
        return Utilization(peak_flops=self.peak, **{kind: self._share_of_peak(kind) for kind in self._recent})

    def _share_of_peak(self, kind: Kind) -> float | None:
        recent = self._recent[kind]
        if not recent:
            return None
        return sum(flops for flops, _ in recent) / (self.peak * sum(seconds for _, seconds in recent))


def cache_directory() -> Path:
    """Returns this user's cache directory, which may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainhouse"

"""Speeds of devices and of the links between them, as far as the choice of a layout depends on them. Imports no torch.

Links are assumptions in round figures, below data sheets: only their ratios decide between layouts. The rate of
products is that of the device: as a worker measured it on this machine, by its maker's data sheet, or assumed by its
link.
"""

import re
import subprocess
from dataclasses import dataclass, replace

from ..resources.machine import measured_rate

# Ranks of a node are neighbours. Devices of different nodes exchange over the network.
DEVICES_PER_NODE = 8

_ASKING_LINKS = ("nvidia-smi", "topo", "-m")
_ASKING_NAMES = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
_ASKING_SECONDS = 10.0

DEVICE_FLOPS = {
    "A100": 312e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "L40S": 362e12,
}
"""The operations per second of dense products in bfloat16 by NVIDIA's data sheets (half of what these give with
sparsity), by words of the device's name."""

# A large product takes 0.73 to 0.78 of the data sheet's rate on an H200, and a pass of an 8B model 0.53 to 0.65 of that
# of the product (docs/performance.md, "On a GPU").
_OF_SHEET = 0.75
_OF_PRODUCT = 0.6


@dataclass(frozen=True)
class Link:
    """A way between devices. Bandwidth of each device in each direction; latency of one exchange."""

    name: str
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Speeds:
    """The link between the devices of a node, the network between nodes, and of a device the bandwidth of its memory
    and the rate that products in 16 bits reach in a pass (in float32 on CPUs).

    source, rate_source: where the link and the rate are known from, for the plan's text.
    """

    link: Link
    network: Link
    memory_bytes_per_second: float
    flops_per_second: float
    source: str = "assumed"
    rate_source: str = "assumed"

    def way(self, num_neighbours: int) -> Link:
        """Returns the slowest link among this many neighbouring ranks."""
        return self.link if num_neighbours <= DEVICES_PER_NODE else self.network


NVLINK = Speeds(Link("nvlink", 200e9, 10e-6), Link("network", 50e9, 30e-6), 2e12, 400e12)
PCIE = Speeds(Link("pcie", 20e9, 20e-6), Link("network", 10e9, 40e-6), 1e12, 100e12)
HOST = Speeds(Link("host", 5e9, 50e-6), Link("network", 1e9, 100e-6), 50e9, 0.2e12)

SPEEDS = {each.link.name: each for each in (NVLINK, PCIE, HOST)}
"""The speeds by the name of the link."""
DEVICE_LINKS = ("auto", *SPEEDS)
"""The values of `--device-link`."""


def speeds_of(link: str, on_cpu: bool = False, device: str | None = None) -> Speeds:
    """Returns the speeds for a value of `--device-link`; for "auto" those of this machine's devices.

    Without a matrix from nvidia-smi, or with a single device, NVLink is assumed, as devices in one node mostly have it.

    Args:
        device: the name of the devices; None for that of this machine's if the link is that of this machine, too.
    Raises:
        ValueError: nothing is known of devices of that name.
    """
    speeds = _of_link(link, on_cpu)
    if device is None and (on_cpu or link != "auto"):
        return speeds
    name = device or device_name()
    found = None if name is None else _with_rate_of(name, speeds)
    if found is None and device is not None:
        raise ValueError(f"--device-name {device} is not one of {', '.join(DEVICE_FLOPS)}: leave it out")
    return found or speeds


def _of_link(link: str, on_cpu: bool) -> Speeds:
    if link != "auto":
        return replace(SPEEDS[link], source="--device-link")
    if on_cpu:
        return replace(HOST, source="ranks on CPUs")
    found = link_in(_answer(_ASKING_LINKS) or "")
    return NVLINK if found is None else replace(SPEEDS[found], source="nvidia-smi")


def _with_rate_of(name: str, speeds: Speeds) -> Speeds | None:
    """Returns the speeds with the rate of products of such a device, None if it is not known."""
    if (measured := measured_rate(name)) is not None:
        return replace(speeds, flops_per_second=rate_in_passes(measured), rate_source=f"measured on {name}")
    words = [each for each in DEVICE_FLOPS if re.search(rf"\b{each}\b", name)]
    if not words:
        return None
    most = DEVICE_FLOPS[max(words, key=len)]
    rate = rate_in_passes(_OF_SHEET * most)
    return replace(speeds, flops_per_second=rate, rate_source=f"{name}'s data sheet")


def rate_in_passes(rate: float) -> float:
    """Returns the operations per second in passes of a GPU that reaches this rate in large products."""
    return _OF_PRODUCT * rate


def device_name() -> str | None:
    """Returns nvidia-smi's name of this machine's first device, None without nvidia-smi or devices."""
    names = (_answer(_ASKING_NAMES) or "").splitlines()
    return names[0].strip() or None if names else None


def _answer(asking: tuple[str, ...]) -> str | None:
    """Returns what nvidia-smi prints, None if it does not run."""
    try:
        done = subprocess.run(asking, capture_output=True, text=True, timeout=_ASKING_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout


def link_in(matrix: str) -> str | None:
    """Returns "nvlink" if all pairs of devices in nvidia-smi's matrix have it, "pcie" if some do not, None for fewer
    than two devices."""
    rows = [line.split() for line in matrix.splitlines()]
    rows = [row for row in rows if row and row[0].startswith("GPU") and "X" in row]
    cells = [cell for row in rows for cell in row[1 : 1 + len(rows)] if cell != "X"]
    if not cells:
        return None
    return "nvlink" if all(cell.startswith("NV") for cell in cells) else "pcie"

"""Speeds of devices and of the links between them, as far as the choice of a layout depends on them. Imports no torch.

The numbers are assumptions in round figures, below data sheets: only their ratios decide between layouts.
"""

import subprocess
from dataclasses import dataclass, replace

# Ranks of a node are neighbours. Devices of different nodes exchange over the network.
DEVICES_PER_NODE = 8

_ASKING = ("nvidia-smi", "topo", "-m")
_ASKING_SECONDS = 10.0


@dataclass(frozen=True)
class Link:
    """A way between devices. Bandwidth of each device in each direction; latency of one exchange."""

    name: str
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Speeds:
    """The link between the devices of a node, the network between nodes, and of a device the bandwidth of its memory
    and the rate that large products in 16 bits reach in a pass (in float32 on CPUs).

    source: where the link is known from, for the plan's text.
    """

    link: Link
    network: Link
    memory_bytes_per_second: float
    flops_per_second: float
    source: str = "assumed"

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


def speeds_of(link: str, on_cpu: bool = False) -> Speeds:
    """Returns the speeds for a value of `--device-link`; for "auto" those of this machine's devices.

    Without a matrix from nvidia-smi, or with a single device, NVLink is assumed, as devices in one node mostly have it.
    """
    if link != "auto":
        return replace(SPEEDS[link], source="--device-link")
    if on_cpu:
        return replace(HOST, source="ranks on CPUs")
    found = link_in(topology() or "")
    return NVLINK if found is None else replace(SPEEDS[found], source="nvidia-smi")


def topology() -> str | None:
    """Returns nvidia-smi's matrix of the links between this machine's devices, None without nvidia-smi or devices."""
    try:
        done = subprocess.run(_ASKING, capture_output=True, text=True, timeout=_ASKING_SECONDS, check=True)
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

"""The rate of products on devices: as a worker measured it on this machine, by the maker's data sheet, or assumed by
the link between them. Imports no torch.
"""

import re
import subprocess
from dataclasses import dataclass

from ..resources.machine import measured_rate

# Ranks of a node are neighbours.
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

ASSUMED_FLOPS = {"nvlink": 400e12, "pcie": 100e12, "host": 0.2e12}
"""The same in passes of devices that nothing is known of, by their link."""

# A large product takes 0.73 to 0.78 of the data sheet's rate on an H200, and a pass of an 8B model 0.53 to 0.65 of that
# of the product (docs/performance.md, "On a GPU").
_OF_SHEET = 0.75
_OF_PRODUCT = 0.6


@dataclass(frozen=True)
class Rate:
    """The operations per second that products in 16 bits reach in a device's passes, in float32 on CPUs.

    source: where it is known from.
    """

    flops_per_second: float
    source: str = "assumed"


def link_of(link: str, on_cpu: bool = False) -> str:
    """Returns the link between devices for a value of `--device-link`; for "auto" that of this machine's devices.

    Without a matrix from nvidia-smi, or with a single device, NVLink is assumed, as devices in one node mostly have it.
    """
    if link != "auto":
        return link
    return "host" if on_cpu else link_in(_answer(_ASKING_LINKS) or "") or "nvlink"


def rate_of(link: str, device: str | None = None) -> Rate:
    """Returns the rate of devices of this name; without a name, of this machine's if the link is that of this machine.

    Args:
        link: a value of `--device-link`.
    Raises:
        ValueError: nothing is known of devices of that name.
    """
    name = device or (device_name() if link == "auto" else None)
    found = None if name is None else _known_rate(name)
    if found is None and device is not None:
        raise ValueError(f"--device-name {device} is not one of {', '.join(DEVICE_FLOPS)}: leave it out")
    return found or Rate(ASSUMED_FLOPS[link_of(link)])


def _known_rate(name: str) -> Rate | None:
    if (measured := measured_rate(name)) is not None:
        return Rate(rate_in_passes(measured), f"measured on {name}")
    words = [each for each in DEVICE_FLOPS if re.search(rf"\b{each}\b", name)]
    if not words:
        return None
    return Rate(rate_in_passes(_OF_SHEET * DEVICE_FLOPS[max(words, key=len)]), f"{name}'s data sheet")


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

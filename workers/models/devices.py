"""Devices: the CUDA devices of this machine that the ranks of a group take, and whether there are any. Imports no
torch.
"""

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from ..planner.checks import cuda_devices
from ..planner.footprint import runs_on_cpu
from ..protocol.config import WorkerConfig

# Of NVIDIA's driver, also on a Jetson and under Windows, and of AMD's, which torch calls CUDA, too.
_DRIVERS = ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd")


def first_device(device: str) -> int:
    """Of "cuda:2" 2, of "cuda" and "auto" 0."""
    return int(device.partition(":")[2] or 0)


def device_of(device: str, rank: int) -> str:
    """Those from the one named on: "cuda:2" -> "cuda:3" of rank 1."""
    return f"cuda:{first_device(device) + rank}"


def check_cuda(device: str, dev: Path = Path("/dev")) -> None:
    """For a process of this machine. dev: where its devices are files. Raises ValueError on CUDA that is not there."""
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:  # a worker tells
        return
    is_there = not torch_version.endswith("+cpu") and any(any(dev.glob(driver)) for driver in _DRIVERS)
    if device.startswith("cuda") and not is_there:
        raise no_cuda(device, torch_version)


def no_cuda(device: str, torch_version: str) -> ValueError:
    return ValueError(
        f"device {device}: this machine, or this build of torch ({torch_version}), has no CUDA: serve with"
        " --device cpu, or install a build of torch for CUDA and NVIDIA's driver"
    )


def check_devices(
    others: Mapping[str, WorkerConfig],
    groups: Mapping[str, WorkerConfig],
    layout_flag: str,
    device_flag: str | None = None,
) -> None:
    """Of groups by their names. device_flag: None = that of their layouts. Raises ValueError where one of them takes
    devices that are not there, and where it shares a part of them with another one, which is an oversight."""
    num_devices, others, device_flag = cuda_devices(), dict(others), device_flag or layout_flag
    for name, group in groups.items():
        own = _taken(group)
        if num_devices is not None and own.stop > num_devices:
            raise ValueError(
                f"{name} takes {_shown(own)}, one for each rank of {layout_flag} {group.parallel}, and there is "
                f"{_shown(range(num_devices))}: name an earlier one with {device_flag}, or use fewer ranks"
            )
        for other, theirs in ((other, _taken(model)) for other, model in others.items()):
            if 0 < len(set(own) & set(theirs)) < min(len(own), len(theirs)):
                raise ValueError(
                    f"{name} takes {_shown(own)}, and {other} {_shown(theirs)}, which is neither apart nor together: "
                    f"name another device with {device_flag}"
                )
        others[name] = group


def _taken(model: WorkerConfig) -> range:
    """Empty where the ranks compute on the CPU."""
    first = first_device(model.device)
    return range(first, first + (0 if runs_on_cpu(model) else model.parallel.num_ranks))


def _shown(devices: range) -> str:
    first, last = f"cuda:{devices.start}", f"cuda:{devices.stop - 1}"
    return first if first == last else f"{first} to {last}"

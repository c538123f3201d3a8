"""The CUDA devices of this machine that rank groups take, and whether it has any. Imports no torch."""

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from ..protocol.worker_config import WorkerConfig
from .machine import runs_on_cpu

# Device files of NVIDIA's driver, also on a Jetson and under Windows, and of AMD's, which torch calls CUDA too.
_DRIVERS = ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd")


def first_device(device: str) -> int:
    """Returns the index of a device: 2 for "cuda:2", 0 for "cuda" and "auto"."""
    return int(device.partition(":")[2] or 0)


def device_of(device: str, rank: int) -> str:
    """Returns the device of a rank, counted from the group's first one: "cuda:3" for rank 1 of "cuda:2"."""
    return f"cuda:{first_device(device) + rank}"


def check_cuda(device: str, dev: Path = Path("/dev")) -> None:
    """Raises ValueError if `device` is CUDA and this machine has none.

    Args:
        dev: directory of the device files.
    """
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:  # without torch here, the worker reports it
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
    num_devices: int | None,
    others: Mapping[str, WorkerConfig],
    groups: Mapping[str, WorkerConfig],
    layout_flag: str,
    device_flag: str | None = None,
) -> None:
    """Checks the devices of groups, given by name.

    Args:
        num_devices: CUDA devices of the machine; None = unknown.
        others: groups that were checked before.
        device_flag: None for the flag of their layouts.
    Raises:
        ValueError: a group takes devices that do not exist, or shares only some of its devices with another group,
            which is surely an oversight.
    """
    others, device_flag = dict(others), device_flag or layout_flag
    for name, group in groups.items():
        own = _devices_of(group)
        if num_devices is not None and own.stop > num_devices:
            raise ValueError(
                f"{name} takes {_shown(own)}, one for each rank of {layout_flag} {group.parallel}, but the machine has "
                f"{_shown(range(num_devices))}: name an earlier one with {device_flag}, or use fewer ranks"
            )
        for other, theirs in ((other, _devices_of(model)) for other, model in others.items()):
            if 0 < len(set(own) & set(theirs)) < min(len(own), len(theirs)):
                raise ValueError(
                    f"{name} takes {_shown(own)}, and {other} {_shown(theirs)}, which overlap in part: "
                    f"name another device with {device_flag}"
                )
        others[name] = group


def _devices_of(model: WorkerConfig) -> range:
    first = first_device(model.device)
    return range(first, first + (0 if runs_on_cpu(model) else model.parallel.num_ranks))


def _shown(devices: range) -> str:
    first, last = f"cuda:{devices.start}", f"cuda:{devices.stop - 1}"
    return first if first == last else f"{first} to {last}"

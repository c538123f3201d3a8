"""Checks before anything is loaded that the base models fit into this machine's memory. Imports no torch."""

import json
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...schemas.adapters.model_files import model_directory
from ..protocol.parallel_spec import SINGLE
from ..protocol.worker_config import WorkerConfig
from ..shapes.model_shape import ModelShape, read_model
from ..shapes.packed_weights import TensorHeader
from ..shapes.quantization import Quantization
from ..shapes.sparse_weights import num_elements
from .parameters import num_parameters, parameters
from .workload import BYTES_PER_NUMBER


def check_fit(groups: Iterable[Sequence[WorkerConfig]], take_turns: bool = False) -> None:
    """Raises ValueError if the models on the CPU need more memory than is available.

    Models on CUDA are checked by their worker. Models that are not on this machine's disk yet are not counted.

    Args:
        groups: for each group, the configurations of its processes that load a model.
        take_turns: whether only one group has its model in memory at a time.
    """
    of_groups = [_needs(group) for group in groups]
    needs = max(of_groups, key=Counter.total, default=Counter[str]()) if take_turns else sum(of_groups, Counter[str]())
    needed, available = needs.total(), available_bytes()
    if available is None or needed <= available:
        return
    each = ", ".join(f"{name} {gigabytes(size)}" for name, size in needs.items())
    raise ValueError(
        f"the base models need {gigabytes(needed)} of memory ({each}), but {gigabytes(available)} is available: "
        "serve fewer or smaller models, load them with --dtype bfloat16, or serve with --shared-devices turns"
    )


def _needs(group: Sequence[WorkerConfig]) -> Counter[str]:
    """Returns the bytes of each model."""
    needs: Counter[str] = Counter()
    for model in group:
        needs[model.model.name] += _kept_bytes(model) if runs_on_cpu(model) else 0
    return needs


def _kept_bytes(model: WorkerConfig) -> int:
    """Returns the bytes of the base model on one rank of its layout."""
    whole = loaded_bytes(model) or 0
    shape = read_model(model.model) if whole and model.parallel != SINGLE else None
    if not isinstance(shape, ModelShape):
        return whole
    return (
        whole * sum(each.kept for each in parameters(shape, shape.own_layout(model.parallel))) // num_parameters(shape)
    )


def loaded_bytes(model: WorkerConfig) -> int | None:
    """Returns the bytes of the weights in the dtype they will be loaded in, None if this machine's disk has none."""
    directory = model_directory(model.model.source)
    files = sorted(directory.glob("*.safetensors")) if directory else []
    if directory is None or not files:
        return None
    headers = {name: header for file in files for name, header in _headers(file)}
    return num_elements(headers, _quantization(directory)) * BYTES_PER_NUMBER[loaded_dtype(model)]


def planned_bytes(model: WorkerConfig) -> int:
    """Returns the bytes of the weights on all ranks together, 0 if this machine's disk has none."""
    return _kept_bytes(model) * model.parallel.num_ranks


def available_bytes() -> int | None:
    """Returns how much memory this process may still use, of the machine's or the container's limit; None if
    unknown."""
    limits = list(available_to(Path("/sys/fs/cgroup")))
    machine = Path("/proc/meminfo")
    if machine.exists():
        fields = dict(line.split(":", 1) for line in machine.read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    return min(limits, default=None)


def runs_on_cpu(model: WorkerConfig) -> bool:
    """Guesses without torch: a worker with the device "auto" uses CUDA if the machine has it."""
    if model.device == "auto":
        return not Path("/dev/nvidia0").exists()
    return model.device.startswith("cpu")


def loaded_dtype(model: WorkerConfig) -> str:
    """Returns the dtype in which the worker loads its base model."""
    if model.dtype != "auto":
        return model.dtype
    return "float32" if runs_on_cpu(model) else "bfloat16"


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _quantization(directory: Path) -> Quantization:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return Quantization()  # reading the model reports it
    return Quantization.of(config) if isinstance(config, dict) else Quantization()


def _headers(file: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Reads the header alone: its length (8 bytes, little-endian), then JSON with dtype, shape and offsets by name."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, TensorHeader(tensor["dtype"], tuple(tensor["shape"]))


def available_to(container: Path) -> Iterator[int]:
    """Yields what is left of a cgroup's memory limit (version 2), if it has one.

    Linux counts the page cache as used, but frees it when memory is needed.
    """
    limit, used, statistics = (container / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        fields = dict(line.split() for line in statistics.read_text().splitlines())
        cache = int(fields["active_file"]) + int(fields["inactive_file"])
        yield int(limit.read_text()) - int(used.read_text()) + cache

"""Checks before anything is loaded that the base models fit into this machine's memory. Imports no torch."""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ....schemas.adapters.model_files import model_directory
from ....schemas.bounds import load_json
from ...protocol.parallel_spec import SINGLE
from ...protocol.worker_config import WorkerConfig
from ...resources.machine import available_bytes, gigabytes, loaded_dtype, runs_on_cpu
from ...shapes.layouts.parameters import BYTES_PER_NUMBER, num_parameters, parameters
from ...shapes.model_shape import ModelShape, read_model
from ...shapes.packed_format import Quantization, TensorHeader
from ...shapes.packed_weights import num_elements
from ...shapes.quantization import read_quantization


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


def _quantization(directory: Path) -> Quantization:
    try:
        config = load_json((directory / "config.json").read_text())
    except (OSError, ValueError):
        return Quantization()  # reading the model reports it
    return read_quantization(config) if isinstance(config, dict) else Quantization()


def _headers(file: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Reads the header alone: its length (8 bytes, little-endian), then JSON with dtype, shape and offsets by name."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = load_json(stream.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, TensorHeader(tensor["dtype"], tuple(tensor["shape"]))

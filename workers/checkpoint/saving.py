"""Writes the trained state of a model into a directory."""

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ...schemas.errors import OperationError
from ..state.vectors import MOMENT_VECTORS
from .description import CheckpointDescription, write_json
from .formats import format_of
from .tensor_files import file_name, save_tensors
from .trained_state import TrainedState

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FULL = (
    f"the weights were not saved because the server's disk is full ({os.strerror(errno.ENOSPC)}): free space on it and "
    "try again"
)


def save(learned: TrainedState, directory: Path, *, base_name: str) -> None:
    """Writes this rank's part into an existing directory that has no files but those of the other ranks.

    Args:
        base_name: the base model's name, used if the model has no other name for it.
    Raises:
        OperationError: the disk is full (server).
    """
    base_name = learned.model.base_name or base_name
    try:
        if learned.part < learned.num_parts:
            _write(learned, directory, base_name)
    except (OSError, SafetensorError) as error:
        # Errors of safetensors have the error number only in their text.
        number = error.errno if isinstance(error, OSError) else None
        if number in _NO_ROOM or any(f"(os error {one})" in str(error) for one in _NO_ROOM):
            raise OperationError(_FULL, "server") from None
        raise


def _write(learned: TrainedState, directory: Path, base_name: str) -> None:
    model, form = learned.model, format_of(learned.model)

    def write(stem: str, tensors: Mapping[str, Tensor]) -> None:
        save_tensors(directory / file_name(stem, learned.part, learned.num_parts), tensors)

    constants = form.constants() if learned.part == 0 else {}
    write(form.stem, {**learned.vectors["weights"].named(), **constants})
    if learned.has_optimizer:
        write("optimizer", _named_moments(learned))
    if "accumulator" in learned.vectors:
        write("window", learned.vectors["accumulator"].named())
    if learned.part > 0:
        return
    form.write_extra_files(directory, base_name)
    if learned.num_parts > 1:
        write_json(directory / f"{form.stem}.safetensors.index.json", _index(learned, form.stem, constants))
    description = CheckpointDescription.of(model, learned.num_steps, learned.window, base_name)
    write_json(directory / "trainhouse.json", description | form.describe())


def _index(learned: TrainedState, stem: str, constants: Iterable[str]) -> dict[str, Any]:
    """Returns the index: the file of each of the weights, and of the constants, which are in the first one."""
    layout, num_parts = learned.model.layout.unsharded, learned.num_parts
    nothing = torch.empty(layout.size, device="meta")
    weight_map = {
        name: file_name(stem, number % num_parts, num_parts)
        for number, matrix in enumerate(layout.matrices)
        for name, _ in matrix.named_tensors(layout.view(nothing, matrix.key))
    }
    weight_map |= dict.fromkeys(constants, file_name(stem, 0, num_parts))
    return {"metadata": {"total_size": 4 * layout.num_weights}, "weight_map": weight_map}


def _named_moments(learned: TrainedState) -> dict[str, Tensor]:
    """Returns the moments by their names in files; before the first step they are zeros."""
    zeros = learned.vectors["weights"] if "exp_avg" not in learned.vectors else None
    of_kinds = {kind: zeros.mapped(torch.zeros_like) if zeros else learned.vectors[kind] for kind in MOMENT_VECTORS}
    return {f"{kind}.{name}": each for kind, vector in of_kinds.items() for name, each in vector.named().items()}

"""Saving: what a model has learned, into a directory."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from ...schemas.errors import OperationError
from ..learner import ADAMW, Learner
from ..lora import Adapter
from .description import Description, write_json
from .hugging_face import WEIGHTS, write_surroundings
from .learned import Learned
from .peft import peft_config
from .tensor_files import file_name, save_tensors

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FULL = (
    f"the weights were not saved, since the server's disk is full ({os.strerror(errno.ENOSPC)}): try again when there "
    "is room on it"
)


def save(learned: Learned, directory: Path, *, base_name: str) -> None:
    """Writes this rank's part into an existing directory, where else only those of other ranks are.

    Raises OperationError (server) where there is no room for it.
    """
    try:
        if learned.is_written_here:
            _write(learned, directory, base_name)
    except (OSError, SafetensorError) as error:
        if _is_for_want_of_room(error):
            raise OperationError(_FULL, "server") from None
        raise


def _is_for_want_of_room(error: OSError | SafetensorError) -> bool:
    """What safetensors raises has the number in its words alone."""
    number = error.errno if isinstance(error, OSError) else None
    return number in _NO_ROOM or any(f"(os error {one})" in str(error) for one in _NO_ROOM)


def _write(learned: Learned, directory: Path, base_name: str) -> None:
    model = learned.model

    def write(stem: str, tensors: Mapping[str, Tensor]) -> None:
        save_tensors(directory / file_name(stem, learned.part, learned.num_parts), tensors)

    write(weights_stem(model), learned.vectors["weights"].named())
    if learned.has_optimizer:
        write("optimizer", _named_moments(learned))
    if "accumulator" in learned.vectors:
        write("window", learned.vectors["accumulator"].named())
    if learned.part > 0:
        return
    if isinstance(model, Adapter):
        write_json(directory / "adapter_config.json", peft_config(model, base_name))
    else:
        write_surroundings(model, directory, learned.num_parts)
    write_json(directory / "trainhouse.json", Description.of(model, learned.num_steps, learned.window, base_name))


def weights_stem(model: Learner) -> str:
    return "adapter_model" if isinstance(model, Adapter) else WEIGHTS


def _named_moments(learned: Learned) -> dict[str, Tensor]:
    """Before the first step they are zeros."""
    zeros = learned.vectors["weights"] if "exp_avg" not in learned.vectors else None
    of_kinds = {kind: zeros.mapped(torch.zeros_like) if zeros else learned.vectors[kind] for kind in ADAMW}
    return {f"{kind}.{name}": each for kind, vector in of_kinds.items() for name, each in vector.named().items()}

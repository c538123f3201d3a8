"""The files that are specific to a kind of model, in addition to those that all models have."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .description import CheckpointDescription
from .tensor_files import Place


class CheckpointFormat:
    """A form of weight files; here, one that has nothing but the model's own tensors."""

    stem: str
    """The first part of the names of the weight files."""
    is_read_at_once = False
    """True if its files are read at once, and written by the first rank only."""

    def describe(self) -> dict[str, Any]:
        """Returns what its trainhouse.json contains in addition to the common fields."""
        return {}

    def legacy_name(self, name: str) -> str:
        """Returns the tensor's name in files of earlier versions."""
        return name

    def joined_tensors(self) -> Mapping[str, Mapping[str, Place]]:
        """Returns the places of the model's tensors in one that files may have instead, by the name of that."""
        return {}

    def missing_tensors(self, saved: CheckpointDescription) -> Collection[str]:
        """Returns the names of the model's tensors that are missing from the checkpoint, which was checked before."""
        return ()

    def check(self, saved: CheckpointDescription) -> None:
        """Raises OperationError if the checkpoint cannot be loaded into the model."""
        raise NotImplementedError

    def constants(self) -> Mapping[str, Tensor]:
        """Returns tensors of the first weight file that are not trained."""
        return {}

    def write_extra_files(self, directory: Path, base_name: str) -> None:
        """Writes the other files that readers of this form expect, except for the index of several weight files."""
        raise NotImplementedError

    def load_constants(self, constants: Mapping[str, Tensor], saved: CheckpointDescription) -> None:
        """Takes the constants of a checkpoint, and what its description contains in addition to the common fields.

        Constants are read from the file on access, which raises OperationError if the file cannot be read.
        """

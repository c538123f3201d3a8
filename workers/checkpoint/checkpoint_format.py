"""The interface to the files that are specific to a kind of model, in addition to those that all models have."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from .description import CheckpointDescription
from .tensor_files import Place


class CheckpointFormat(Protocol):
    @property
    def stem(self) -> str:
        """The first part of the names of the weight files."""
        ...

    @property
    def is_read_at_once(self) -> bool:
        """True if its files are read at once, and written by the first rank only."""
        ...

    def describe(self) -> dict[str, Any]:
        """Returns what its trainhouse.json contains in addition to the common fields."""
        ...

    def legacy_name(self, name: str) -> str:
        """Returns the tensor's name in files of earlier versions."""
        ...

    def joined_tensors(self) -> Mapping[str, Mapping[str, Place]]:
        """Returns the places of the model's tensors in one that files may have instead, by the name of that."""
        ...

    def missing_tensors(self, saved: CheckpointDescription) -> Collection[str]:
        """Returns the names of the model's tensors that are missing from the checkpoint, which was checked before."""
        ...

    def check(self, saved: CheckpointDescription) -> None:
        """Raises OperationError if the checkpoint cannot be loaded into the model."""
        ...

    def constants(self) -> Mapping[str, Tensor]:
        """Returns tensors of the first weight file that are not trained."""
        ...

    def write_extra_files(self, directory: Path, base_name: str) -> None:
        """Writes the other files that readers of this form expect, except for the index of several weight files."""
        ...

    def load_constants(self, constants: Mapping[str, Tensor], saved: CheckpointDescription) -> None:
        """Takes the constants of a checkpoint, and what its description contains in addition to the common fields.

        Constants are read from the file on access, which raises OperationError if the file cannot be read.
        """
        ...

"""Form: how a kind of model lies in a directory, beside what all of them have there."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from .description import Description


class Form(Protocol):
    @property
    def stem(self) -> str:
        """Of the files of weights."""
        ...

    @property
    def is_small(self) -> bool:
        """Whether its files are read as a whole, and written by the first rank."""
        ...

    def describe(self) -> dict[str, Any]:
        """What its description says beyond that of any model."""
        ...

    def older_name(self, name: str) -> str:
        """Returns what files of earlier versions call the tensor of this name."""
        ...

    def lacking(self, saved: Description) -> Collection[str]:
        """Returns the names of the tensors that the model has and what was saved, which is checked, has not."""
        ...

    def check(self, saved: Description) -> None:
        """Raises OperationError where the model cannot become what was saved."""
        ...

    def constants(self) -> Mapping[str, Tensor]:
        """What its first file of weights has and nobody learns."""
        ...

    def write_beside(self, directory: Path, base_name: str) -> None:
        """What else its readers want to find, but for an index of several files."""
        ...

    def take(self, constants: Mapping[str, Tensor], saved: Description) -> None:
        """Those of a saved model, and what its description says beyond that of any. Constants are read where they are
        asked for: raises OperationError."""
        ...

"""A format in which files hold weights in fewer bits. The formats are a plugin: a file and a row each in
`workers/formats`. Imports no torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..protocol.plugins import plugin_rows
from .name_patterns import NamePatterns
from .released_format import ReleasedFormat


@dataclass(frozen=True)
class TensorHeader:
    dtype: str
    """The name that safetensors gives it."""
    shape: tuple[int, ...]


Tensors = Mapping[str, TensorHeader]
"""The tensors of files by name."""


class Packed(Protocol):
    """A packed weight. What reads its numbers is in the table READERS by its type."""

    @property
    def names(self) -> set[str]:
        """The tensors in files that make up this weight."""
        ...

    @property
    def num_numbers(self) -> int: ...


@dataclass(frozen=True)
class Grouping:
    """The way the weights of some modules are packed."""

    bits: int
    """The bits of a code."""
    size: int | None
    """Columns that share a scale, None if a whole row does."""
    is_float: bool = False
    """True if codes are floats (MXFP6), not integers."""
    targets: NamePatterns | None = None
    """The modules packed this way, by name; None for all modules that no other grouping names."""


@dataclass(frozen=True)
class Quantization:
    """The parts of a `quantization_config` that shapes in files do not show."""

    method: str = ""
    blocks: tuple[tuple[int, int], ...] = ()
    """Possible rows and columns that share a scale."""
    groupings: tuple[Grouping, ...] = ()
    low_zero_points: bool = True
    """True if files of GPTQ hold zero points less one."""

    def groupings_of(self, module: str) -> Sequence[Grouping]:
        """Returns how the weight of a module may be packed."""
        named = [each for each in self.groupings if each.targets is not None and each.targets.match(module)]
        return named or [each for each in self.groupings if each.targets is None] or self.groupings


@dataclass(frozen=True)
class PackedFormat:
    """A format of packed weights: how they are found, and what `quantization_config` says of them.

    `given` is a release's `quantization_config`, which may be wrong in any way.
    """

    find: Callable[[str, Tensors, Quantization], tuple[str, Packed] | None]
    """Returns the weight whose codes are the tensor of this name, with the name that it has in an unpacked model; None
    if the tensor is no weight's codes in this format."""
    settings: Callable[[Any], Quantization] = lambda given: Quantization()
    """Returns what `given` says in the format's own way. Raises ValueError if such weights cannot be read."""
    kept: Callable[[Any], Iterable[ReleasedFormat]] = lambda given: ()
    """Returns the formats in which memory can hold the weights."""


def packed_formats() -> Mapping[str, PackedFormat]:
    """Returns the formats by `quant_method` in a config.json."""
    return plugin_rows("workers.formats.rows", "METHODS")

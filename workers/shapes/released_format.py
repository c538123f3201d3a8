"""Says how a release holds its packed weights, for keeping them so in memory. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

from .name_patterns import NamePatterns
from .quantization import group_size_of, groups_of, quantization_of

Codes = Literal["float4", "float8", "integer"]
Scales = Literal["power of two", "bfloat16", "float32", "float8"]

_CODE_BITS: Mapping[Codes, int] = {"float4": 4, "float8": 8, "integer": 4}
_SCALE_BITS: Mapping[Scales, int] = {"power of two": 8, "bfloat16": 16, "float32": 32, "float8": 8}
# With float8 scales each row has a factor of its own, in 64 bits, since rows of several matrices may be in one.
_FACTOR_BITS = 64
# Blocks of fewer numbers would save little memory.
_LEAST_BLOCK = 8
# The matrices of an expert in files, where parameters hold those of all experts.
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


@dataclass(frozen=True)
class ReleasedFormat:
    """Codes, and a scale for each block of them. Integer codes have 4 bits.

    block: rows and columns that share a scale; None columns if a whole row shares one.
    """

    codes: Codes
    scales: Scales
    block: tuple[int, int | None]

    @property
    def code_bits(self) -> int:
        return _CODE_BITS[self.codes]

    def blocks(self, rows: int, columns: int) -> Iterator[tuple[int, int]]:
        """Yields sizes of blocks that divide a matrix evenly, largest first.

        Ranks' parts and merged matrices begin within the release's blocks, where smaller ones fit.
        """
        height, width = self.block[0], self.block[1] or columns
        before = None
        while height * width >= _LEAST_BLOCK:
            size = _dividing(height, rows), _dividing(width, columns)
            if size != before and prod(size) >= _LEAST_BLOCK:
                yield size
            before = size
            if self.block[1] is None:
                return
            height, width = max(1, height // 2), width // 2

    def bytes_of(self, shape: Sequence[int]) -> float | None:
        """Returns the bytes of weights of this shape [..., rows, columns], None if no block divides their matrices."""
        rows, columns = shape[-2:]
        block = next(self.blocks(rows, columns), None)
        if block is None or columns * self.code_bits % 8:
            return None
        bits = self.code_bits + _SCALE_BITS[self.scales] / prod(block)
        bits += _FACTOR_BITS / columns if self.scales == "float8" else 0
        return prod(shape) * bits / 8


@dataclass(frozen=True)
class ReleasedWeights:
    """The weights that a release holds packed.

    formats: of the weights that can be kept as they are. reason: why there are none. ignored: patterns of the layers
    that are not packed.
    """

    formats: tuple[ReleasedFormat, ...] = ()
    reason: str = "its config.json has no quantization_config"
    ignored: tuple[str, ...] = ()

    @staticmethod
    def of(config: Mapping[str, object]) -> "ReleasedWeights":
        """Reads them from a config.json. Raises ValueError if names of layers in it are no list."""
        given: Any = quantization_of(config)
        if not given:
            return ReleasedWeights()
        formats = tuple(dict.fromkeys(_formats(given)))
        lists = (_names(key, given.get(key)) for key in ("ignore", "modules_to_not_convert", "exclude_modules"))
        ignored = tuple(name for names in lists for name in names)
        reason = "" if formats else _reason(given)
        return ReleasedWeights(formats, reason, ignored)

    def ignores(self, name: str) -> bool:
        """True if the release does not pack the parameter of this name."""
        return any(map(self._patterns.match, _names_in_files(name)))

    @cached_property
    def _patterns(self) -> NamePatterns:
        return NamePatterns.of([_below_model(each) for each in self.ignored])

    def bytes_of(self, shape: Sequence[int]) -> float | None:
        """Returns the most bytes of packed weights of this shape, None if no format suits them."""
        return max(filter(None, (each.bytes_of(shape) for each in self.formats)), default=None)


def _names(key: str, value: object) -> Sequence[str]:
    if value is not None and not isinstance(value, list | tuple):
        raise ValueError(f"quantization_config has {key} {value!r}, which must be a list of names: use another release")
    return [*map(str, value or ())]


def _reason(given: Any) -> str:
    """Returns why weights of a release are in no ReleasedFormat."""
    bits = given.get("bits")
    packed = f"{given.get('quant_method')}{'' if bits is None else f' in {bits} bits'}"
    return (
        f"its weights are packed by {packed}, and only codes with one scale for each block, without zero points, are "
        "kept: MXFP4, MXFP8, NVFP4, FP8, and INT4 of compressed-tensors"
    )


def _formats(given: Any) -> Iterator[ReleasedFormat]:
    method = given.get("quant_method")
    if method == "mxfp4":
        yield ReleasedFormat("float4", "power of two", (1, 32))
    elif method == "mxfp8":
        yield ReleasedFormat("float8", "power of two", (1, 32))
    elif method in ("fp8", "fbgemm_fp8"):
        block = given.get("weight_block_size")
        yield ReleasedFormat("float8", "float32", (int(block[0]), int(block[1])) if block else (1, None))
    elif method == "modelopt":
        yield from _of_modelopt(str(given.get("quant_algo")))
    elif method == "compressed-tensors":
        for group in groups_of(given):
            yield from _compressed(group["weights"], str(group.get("format") or given.get("format")))


def _of_modelopt(algorithm: str) -> Iterator[ReleasedFormat]:
    if algorithm in ("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"):
        yield ReleasedFormat("float4", "float8", (1, 16))
    if algorithm in ("FP8", "MIXED_PRECISION"):
        yield ReleasedFormat("float8", "float32", (1, None))
    if algorithm == "MXFP8":
        yield ReleasedFormat("float8", "power of two", (1, 32))


def _compressed(weights: Any, layout: str) -> Iterator[ReleasedFormat]:
    bits, kind = weights.get("num_bits"), weights.get("type")
    columns = group_size_of("group_size", weights.get("group_size"))
    if weights.get("actorder") in (True, "group"):
        return  # columns next to each other share no scale
    if kind == "int" and bits == 4 and weights.get("symmetric", True):
        yield ReleasedFormat("integer", "bfloat16", (1, columns))
    elif kind == "float" and bits == 4:
        yield ReleasedFormat("float4", "power of two" if layout.startswith("mxfp4") else "float8", (1, columns or 16))
    elif kind == "float" and bits == 8:
        block = weights.get("block_structure")
        scales: Scales = "power of two" if layout.startswith("mxfp8") else "float32"
        yield ReleasedFormat("float8", scales, (int(block[0]), int(block[1])) if block else (1, columns))


def _dividing(size: int, number: int) -> int:
    """Returns the largest of size, size / 2, size / 4, ... that divides the number."""
    while size > 1 and number % size:
        size //= 2
    return max(1, size)


def _names_in_files(parameter: str) -> Iterator[str]:
    """Yields names that a parameter's linear layers may have in files."""
    name = parameter.removesuffix(".weight")
    yield name
    path, _, leaf = name.rpartition(".")
    if path.endswith(".experts"):
        ups = ("gate_proj", "up_proj", "w1", "w3") if "up" in leaf else ("down_proj", "w2")
        yield from (f"{path}.0.{each}" for each in _OF_EXPERTS if each in ups)


# Names of the trunk in files, in the place of "model.".
_HEADS = ("model.language_model.", "language_model.model.", "language_model.", "backbone.")


def _below_model(pattern: str) -> str:
    """Returns the pattern with the name of the trunk that modules have."""
    head = next((each for each in _HEADS if pattern.startswith(each)), "model.")
    return f"model.{pattern.removeprefix(head)}" if pattern.startswith(head) else pattern

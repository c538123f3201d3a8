"""Finds the weights that files hold in fewer bits, and which of them can stay packed in memory.

Reads names, dtypes and shapes alone. Imports no torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from .name_patterns import NamePatterns
from .packed_format import Packed, Quantization, ReleasedFormat, Tensors, packed_formats
from .quantization import conversion_error, quantization_of

_EIGHT_BIT = {"F8_E4M3", "F8_E5M2", "I8", "U8"}
"""Dtypes of codes in files, as safetensors names them. A byte can also hold two numbers of 4 bits."""
_NOT_NUMBERS = {"I16", "I32", "I64", "U16", "U32", "U64"}
"""Dtypes of codes that are packed into larger integers, which never are a weight's own numbers."""
_NOT_OF_WEIGHTS = (
    *("input_scale", "input_global_scale", "activation_scale", "output_scale", "qscale_act"),
    *("q_scale", "k_scale", "v_scale"),
)
"""Last parts of the names of scales that only products in 8 or 4 bits, and caches, need."""

_NOT_READ = {"pre_quant_scale", "svdquant_lora_a", "_weight_act_pre_scale"}
"""Last parts of the names of scales of inputs, and of a matrix that is added."""

_CONVERTED = {"bitmask": "sparse-bitmask", "W_q": "hqq"}
"""Last parts of the names of codes that another program has to convert, and how these are packed."""

# Names of the trunk in files, in the place of "model.".
_HEADS = ("model.language_model.", "language_model.model.", "language_model.", "backbone.")


def packed_weights(tensors: Tensors, quantization: Quantization) -> dict[str, Packed]:
    """Returns the packed weights among the tensors of files, by the names that they have in an unpacked model.

    Raises:
        ValueError: a weight is packed in a way that is not known, so that its numbers would be wrong.
    """
    found = dict(_found(tensors, quantization))
    used = {name for packed in found.values() for name in packed.names}
    for name, header in tensors.items():
        path, _, leaf = name.rpartition(".")
        if leaf in _CONVERTED:
            raise ValueError(f"{name}: {conversion_error(_CONVERTED[leaf])}")
        if leaf in _NOT_READ:
            raise ValueError(f"{path} needs {leaf} to be dequantized, which is not supported: use another release")
        if name in used:
            continue
        if header.dtype in _EIGHT_BIT and leaf.endswith(("weight", "_packed", "_blocks", "_proj", "_qdata")):
            raise ValueError(f"{name} is packed as {header.dtype}, without scales that are known: use another release")
        if header.dtype in _NOT_NUMBERS and leaf.endswith("weight"):
            raise ValueError(f"{name} is packed as {header.dtype}, without scales that are known: use another release")
        if leaf == "scales":
            raise ValueError(f"{path} needs {leaf}, which belong to no packed weight: use another release")
    return found


def unpacked_names(tensors: Tensors, packed: Mapping[str, Packed]) -> list[str]:
    """Returns the names of the tensors that are weights as they are."""
    used = {name for each in packed.values() for name in each.names}
    return [
        name for name in tensors if name not in used and not (packed and name.rpartition(".")[2] in _NOT_OF_WEIGHTS)
    ]


def num_elements(tensors: Tensors, quantization: Quantization) -> int:
    """Returns how many numbers the weights in these files have when none is packed."""
    packed = packed_weights(tensors, quantization)
    plain = sum(prod(tensors[name].shape) for name in unpacked_names(tensors, packed))
    return plain + sum(each.num_numbers for each in packed.values())


def _found(tensors: Tensors, quantization: Quantization) -> Iterator[tuple[str, Packed]]:
    finders = [*dict.fromkeys(format.find for format in packed_formats().values())]
    for name in tensors:
        each = next(filter(None, (find(name, tensors, quantization) for find in finders)), None)
        if each is not None:
            yield each


@dataclass(frozen=True)
class ReleasedWeights:
    """The weights that a release holds packed."""

    formats: tuple[ReleasedFormat, ...] = ()
    """Those in which weights can be kept as they are."""
    reason: str = "its config.json has no quantization_config"
    """Says why there are none."""
    ignored: tuple[str, ...] = ()
    """Patterns of the layers that are not packed."""

    @staticmethod
    def of(config: Mapping[str, object]) -> "ReleasedWeights":
        """Reads them from a config.json. Raises ValueError if names of layers in it are no list."""
        given: Any = quantization_of(config)
        if not given:
            return ReleasedWeights()
        method = packed_formats().get(str(given.get("quant_method")))
        formats = () if method is None else tuple(dict.fromkeys(method.kept(given)))
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


def _names_in_files(parameter: str) -> Iterator[str]:
    """Yields names that a parameter's linear layers may have in files."""
    name = parameter.removesuffix(".weight")
    yield name
    path, _, leaf = name.rpartition(".")
    if path.endswith(".experts"):
        ups = ("gate_proj", "up_proj", "w1", "w3") if "up" in leaf else ("down_proj", "w2")
        yield from (f"{path}.0.{each}" for each in ups)


def _below_model(pattern: str) -> str:
    """Returns the pattern with the name of the trunk that modules have."""
    head = next((each for each in _HEADS if pattern.startswith(each)), "model.")
    return f"model.{pattern.removeprefix(head)}" if pattern.startswith(head) else pattern

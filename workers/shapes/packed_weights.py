"""Finds the weights that a model's files hold in fewer bits: codes in one tensor, their scales in others.

Reads names, dtypes and shapes alone, of the layouts of gpt-oss, DeepSeek, compressed-tensors and NVIDIA's ModelOpt.
Imports no torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, Literal

METHODS = ("mxfp4", "fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
"""Values of `quant_method` in a config.json whose weights can be dequantized."""

_EIGHT_BIT = {"F8_E4M3", "F8_E5M2", "I8", "U8"}
"""Dtypes of codes in files, as safetensors names them. A byte can also hold two numbers of 4 bits."""
_FLOAT4_SCALES = {"F8_E4M3", "F8_E8M0", "U8"}
_OF_ACTIVATIONS = (
    *("input_scale", "input_global_scale", "activation_scale", "output_scale", "qscale_act"),
    *("q_scale", "k_scale", "v_scale"),
)
"""Last parts of the names of scales that only products in 8 or 4 bits, and caches, need."""

_NOT_READ = {"weight_g_idx", "pre_quant_scale", "svdquant_lora_a"}
"""Last parts of the names of an order of columns, of scales of inputs, and of a matrix that is added."""

CodeKind = Literal["float8", "float4", "integer"]


@dataclass(frozen=True)
class TensorHeader:
    """dtype: as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Quantization:
    """The parts of a `quantization_config` that shapes in files do not show.

    blocks: possible rows and columns that share a scale. integers: possible (bits, columns that share a scale); None
    columns if a whole row shares one.
    """

    method: str = ""
    blocks: tuple[tuple[int, int], ...] = ()
    integers: tuple[tuple[int, int | None], ...] = ()

    @staticmethod
    def of(config: Mapping[str, object]) -> "Quantization":
        """Reads it from a config.json, or from its text part's; without one, returns an empty one."""
        given: Any = quantization_of(config)
        weights = [group.get("weights") or {} for group in (given.get("config_groups") or {}).values()]
        blocks = [given.get("weight_block_size"), *(each.get("block_structure") for each in weights)]
        return Quantization(
            str(given.get("quant_method", "")),
            tuple((int(rows), int(columns)) for rows, columns in filter(None, blocks)),
            tuple((int(each["num_bits"]), each.get("group_size")) for each in weights if each.get("type") == "int"),
        )


def quantization_of(config: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the `quantization_config` of a config.json or of its text part, empty if it has none."""
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    given = config.get("quantization_config") or nested
    return given if isinstance(given, dict) else {}


@dataclass(frozen=True)
class PackedWeight:
    """A weight of which files hold codes and scales. Each number is a code times the scale of its block.

    Names are those of tensors in files. numbers: per element of the codes' last dimension that is indexed. bits: of an
    integer code. shape: of the codes' numbers; the last dimension may be padded, see `true_shape`. block: rows and
    columns that share a scale. factor, divisor: a number that all scales are multiplied or divided by. zero_points: are
    subtracted from the codes. true_shape: a tensor that holds the shape without padding. transposed: whether the last
    two dimensions of the weight are swapped in files.
    """

    kind: CodeKind
    codes: str
    scales: str
    shape: tuple[int, ...]
    numbers: int
    block: tuple[int, int]
    bits: int = 0
    factor: str | None = None
    divisor: str | None = None
    zero_points: str | None = None
    true_shape: str | None = None
    transposed: bool = False

    @property
    def names(self) -> set[str]:
        """The tensors in files that make up this weight."""
        every = (self.codes, self.scales, self.factor, self.divisor, self.zero_points, self.true_shape)
        return {name for name in every if name is not None}


def packed_weights(tensors: Mapping[str, TensorHeader], quantization: Quantization) -> dict[str, PackedWeight]:
    """Returns the packed weights among the tensors of files, by the names that they have in an unpacked model.

    Raises:
        ValueError: a weight is packed in a way that is not known, so that its numbers would be wrong.
    """
    found = dict(_found(tensors, quantization))
    used = {name for packed in found.values() for name in packed.names}
    for name, header in tensors.items():
        path, _, leaf = name.rpartition(".")
        if leaf in _NOT_READ:
            raise ValueError(f"{path} needs {leaf} to be dequantized, which is not supported: use another release")
        if header.dtype in _EIGHT_BIT and name not in used and leaf.endswith(("weight", "_packed", "_blocks", "_proj")):
            raise ValueError(f"{name} is packed as {header.dtype}, without scales that are known: use another release")
    return found


def unpacked_names(tensors: Mapping[str, TensorHeader], packed: Mapping[str, PackedWeight]) -> list[str]:
    """Returns the names of the tensors that are weights as they are."""
    used = {name for each in packed.values() for name in each.names}
    return [
        name for name in tensors if name not in used and not (packed and name.rpartition(".")[2] in _OF_ACTIVATIONS)
    ]


def num_elements(tensors: Mapping[str, TensorHeader], quantization: Quantization) -> int:
    """Returns how many numbers the weights in these files have when none is packed."""
    packed = packed_weights(tensors, quantization)
    plain = sum(prod(tensors[name].shape) for name in unpacked_names(tensors, packed))
    return plain + sum(prod(each.shape) for each in packed.values())


def _found(tensors: Mapping[str, TensorHeader], quantization: Quantization) -> Iterator[tuple[str, PackedWeight]]:
    for name, header in tensors.items():
        path, _, leaf = name.rpartition(".")
        if leaf.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in tensors:
            weight = name.removesuffix("_blocks")
            yield weight, _experts_of_gpt_oss(name, f"{weight}_scales", header)
        elif leaf == "weight_packed":
            yield f"{path}.weight", _compressed(path, tensors, quantization)
        elif header.dtype in _EIGHT_BIT and (scales := _scales_of(name, tensors)) is not None:
            yield name, _scaled(name, scales, tensors, quantization)


def _scales_of(name: str, tensors: Mapping[str, TensorHeader]) -> str | None:
    path, _, leaf = name.rpartition(".")
    others = (f"{path}.scale", f"{path}.qscale_weight") if leaf == "weight" else ()
    return next((each for each in (f"{name}_scale_inv", f"{name}_scale", *others) if each in tensors), None)


def _experts_of_gpt_oss(codes: str, scales: str, header: TensorHeader) -> PackedWeight:
    """Returns a matrix of all experts with [experts, outputs, blocks, 16] codes, two in a byte."""
    *lead, num_blocks, num_bytes = header.shape
    shape = (*lead, num_blocks * num_bytes * 2)
    return PackedWeight("float4", codes, scales, shape, 2 * num_bytes, (1, 2 * num_bytes), transposed=True)


def _compressed(path: str, tensors: Mapping[str, TensorHeader], quantization: Quantization) -> PackedWeight:
    """Returns a weight of compressed-tensors whose codes are packed into bytes or into 32-bit integers."""
    codes, scales = f"{path}.weight_packed", f"{path}.weight_scale"
    if scales not in tensors:
        raise ValueError(f"{codes} has no scales in {scales}: download the model again")
    beside = {
        key: f"{path}.{leaf}" if f"{path}.{leaf}" in tensors else None
        for key, leaf in (
            ("divisor", "weight_global_scale"),
            ("zero_points", "weight_zero_point"),
            ("true_shape", "weight_shape"),
        )
    }
    *rows, columns = tensors[codes].shape
    if tensors[codes].dtype == "U8":
        plain = PackedWeight("float4", codes, scales, (*rows, 2 * columns), 2, (1, 1))
    else:
        bits = _bits(path, columns, tensors[scales].shape[-1], quantization)
        plain = PackedWeight("integer", codes, scales, (*rows, columns * 32 // bits), 32 // bits, (1, 1), bits)
    return replace(plain, block=_block(plain, tensors[scales].shape, quantization), **beside)


def _bits(path: str, columns: int, num_groups: int, quantization: Quantization) -> int:
    """Returns the bits of a code that fit the numbers of 32-bit integers and of scales in a row."""
    for bits, size in quantization.integers:
        if 8 % bits == 0 and (not size or size < 0 or ceil(columns * 32 / bits / size) == num_groups):
            return bits
    raise ValueError(f"{path}: codes of {quantization.integers} (bits, group) cannot be read: use another release")


def _scaled(codes: str, scales: str, tensors: Mapping[str, TensorHeader], quantization: Quantization) -> PackedWeight:
    """Returns a weight whose codes have its own name."""
    dtype, shape = tensors[codes].dtype, tensors[codes].shape
    path = codes.rpartition(".")[0]
    factor, zero_points = f"{scales}_2", f"{path}.weight_zero_point"
    if dtype == "U8" and tensors[scales].dtype not in _FLOAT4_SCALES:
        raise ValueError(f"{codes} has codes of 4 bits in an order that is not known: use another release")
    if dtype == "U8" or (dtype == "I8" and quantization.method == "fp8"):
        packed = PackedWeight("float4", codes, scales, (*shape[:-1], 2 * shape[-1]), 2, (1, 1))
    else:
        packed = PackedWeight("float8" if dtype != "I8" else "integer", codes, scales, shape, 1, (1, 1), bits=8)
    return replace(
        packed,
        block=_block(packed, tensors[scales].shape, quantization),
        factor=factor if factor in tensors else None,
        zero_points=zero_points if zero_points in tensors else None,
    )


def grid_of(shape: Sequence[int], scales: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns of the scales of a matrix, or of each matrix in a stack.

    Scales can lack dimensions, the last ones first, or have ones after each.
    """
    of_matrix = scales[len(shape) - 2 :]
    if prod(scales) == 1 or not of_matrix:
        return 1, 1
    if len(of_matrix) == 4:
        return of_matrix[0], of_matrix[2]
    return of_matrix[0], (of_matrix[1] if len(of_matrix) == 2 else 1)


def _block(packed: PackedWeight, scales: Sequence[int], quantization: Quantization) -> tuple[int, int]:
    """Returns the rows and columns that share a scale."""
    (rows, columns), (across, along) = packed.shape[-2:], grid_of(packed.shape, scales)
    for block in quantization.blocks:
        if (ceil(rows / block[0]), ceil(columns / block[1])) == (across, along):
            return block
    for _, size in quantization.integers:
        if packed.kind == "integer" and size and size > 0 and (rows, ceil(columns / size)) == (across, along):
            return 1, size
    if rows % across or columns % along:
        raise ValueError(f"{packed.codes} of {rows} x {columns} has {across} x {along} scales: use another release")
    return rows // across, columns // along

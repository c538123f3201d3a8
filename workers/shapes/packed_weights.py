"""Finds the weights that a model's files hold in fewer bits: codes in one tensor, their scales in others.

Reads names, dtypes and shapes alone, of the layouts of gpt-oss, DeepSeek, compressed-tensors, NVIDIA's ModelOpt, AMD's
Quark, torchao, GPTQ, AWQ and bitsandbytes. Imports no torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Literal

from .quantization import GPTQ_BITS, Quantization, conversion_error

_EIGHT_BIT = {"F8_E4M3", "F8_E5M2", "I8", "U8"}
"""Dtypes of codes in files, as safetensors names them. A byte can also hold two numbers of 4 bits."""
_FLOAT4_SCALES = {"F8_E4M3", "F8_E8M0", "U8"}
_NOT_NUMBERS = {"I16", "I32", "I64", "U16", "U32", "U64"}
"""Dtypes of codes that are packed into larger integers, which never are a weight's own numbers."""
_WORDS = {"I32", "U32"}
"""Dtypes of integers into which codes of compressed-tensors and zero points are packed."""
_NOT_OF_WEIGHTS = (
    *("input_scale", "input_global_scale", "activation_scale", "output_scale", "qscale_act"),
    *("q_scale", "k_scale", "v_scale"),
)
"""Last parts of the names of scales that only products in 8 or 4 bits, and caches, need."""

_NOT_READ = {"pre_quant_scale", "svdquant_lora_a", "_weight_act_pre_scale"}
"""Last parts of the names of scales of inputs, and of a matrix that is added."""

_CONVERTED = {"bitmask": "sparse-bitmask", "W_q": "hqq"}
"""Last parts of the names of codes that another program has to convert, and how these are packed."""

CodeKind = Literal["float8", "float6", "float4", "integer"]

# bitsandbytes divides numbers of 8 bits by the largest code.
_LARGEST_INT8 = 127
_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
# Numbers that AutoAWQ packs into an integer of 32 bits: their places from the lowest bits.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class TensorHeader:
    """dtype: as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PackedWeight:
    """A weight of which files hold codes and scales: each number is a code times the scale of its block.

    Names are those of tensors in files.
    """

    kind: CodeKind
    """The codes are floats, or integers whose middle one is zero."""
    codes: str
    scales: str
    shape: tuple[int, ...]
    """Shape of the weight. The last dimension may be padded, see `true_shape`."""
    numbers: int
    """Codes that are packed in `elements` elements of the codes' last dimension."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    bits: int = 0
    """Bits of an integer code."""
    elements: int = 1
    factor: str | None = None
    """All scales are multiplied by this number."""
    divisor: str | None = None
    """All scales are divided by this number."""
    denominator: int = 1
    """All scales are divided by it, too."""
    zero_points: str | None = None
    """These are subtracted from the codes."""
    zero_point_axis: int | None = None
    """The dimension along which zero points are packed as the codes are, None if they are not."""
    low_zero_points: bool = False
    """True if packed zero points are one too low."""
    true_shape: str | None = None
    """A tensor that holds the shape without padding."""
    groups: str | None = None
    """A tensor that holds the column of scales for each column of numbers."""
    layout: str | None = None
    """A tensor that holds the layout of the codes as bitsandbytes numbers it, 0 if they are in rows."""
    order: tuple[int, ...] = ()
    """The places in an element at which its numbers are."""
    is_mirrored: bool = False
    """True if codes, scales and zero points are transposed in files."""
    transposed: bool = False
    """True if the last two dimensions of the weight are swapped in files."""

    @property
    def names(self) -> set[str]:
        """The tensors in files that make up this weight."""
        every = (self.codes, self.scales, self.factor, self.divisor, self.zero_points)
        every += (self.true_shape, self.groups, self.layout)
        return {name for name in every if name is not None}

    @property
    def num_numbers(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class TableWeight:
    """A weight of bitsandbytes in 4 bits: codes are places in a table, and consecutive numbers share a scale.

    Names are those of tensors in files.
    """

    codes: str
    """Two in a byte."""
    scales: str
    """The scale of each block, or its place in `nested_table` if there are `nested_scales`."""
    table: str
    state: str
    """JSON in bytes, which holds the shape and the sizes of blocks."""
    num_numbers: int
    """Numbers for which the codes have room."""
    nested_scales: str | None = None
    """The scales of blocks of scales."""
    nested_table: str | None = None

    @property
    def names(self) -> set[str]:
        """The tensors in files that make up this weight."""
        every = (self.codes, self.scales, self.table, self.state, self.nested_scales, self.nested_table)
        return {name for name in every if name is not None}


Packed = PackedWeight | TableWeight


def packed_weights(tensors: Mapping[str, TensorHeader], quantization: Quantization) -> dict[str, Packed]:
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


def unpacked_names(tensors: Mapping[str, TensorHeader], packed: Mapping[str, Packed]) -> list[str]:
    """Returns the names of the tensors that are weights as they are."""
    used = {name for each in packed.values() for name in each.names}
    return [
        name for name in tensors if name not in used and not (packed and name.rpartition(".")[2] in _NOT_OF_WEIGHTS)
    ]


def num_elements(tensors: Mapping[str, TensorHeader], quantization: Quantization) -> int:
    """Returns how many numbers the weights in these files have when none is packed."""
    packed = packed_weights(tensors, quantization)
    plain = sum(prod(tensors[name].shape) for name in unpacked_names(tensors, packed))
    return plain + sum(each.num_numbers for each in packed.values())


def _found(tensors: Mapping[str, TensorHeader], quantization: Quantization) -> Iterator[tuple[str, Packed]]:
    for name, header in tensors.items():
        path, _, leaf = name.rpartition(".")
        if leaf.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in tensors:
            weight = name.removesuffix("_blocks")
            yield weight, _checked(_experts_of_gpt_oss(name, f"{weight}_scales", tensors), tensors)
        elif leaf == "weight_packed":
            yield f"{path}.weight", _compressed(path, tensors, quantization)
        elif leaf == "qweight":
            yield f"{path}.weight", _of_gptq_or_awq(path, tensors, quantization)
        elif f"{name}.absmax" in tensors:
            yield name, _of_bitsandbytes(name, tensors)
        elif leaf.startswith("_") and leaf.endswith("_qdata"):
            yield _of_torchao(name, tensors, quantization)
        elif header.dtype in _EIGHT_BIT and (scales := _scales_of(name, tensors)) is not None:
            yield name, _scaled(name, scales, tensors, quantization)


def _scales_of(name: str, tensors: Mapping[str, TensorHeader]) -> str | None:
    path, _, leaf = name.rpartition(".")
    others = (f"{path}.scale", f"{path}.qscale_weight", f"{path}.SCB") if leaf == "weight" else ()
    return next((each for each in (f"{name}_scale_inv", f"{name}_scale", *others) if each in tensors), None)


def _experts_of_gpt_oss(codes: str, scales: str, tensors: Mapping[str, TensorHeader]) -> PackedWeight:
    """Returns a matrix of all experts with [experts, outputs, blocks, 16] codes, two in a byte."""
    if len(tensors[codes].shape) < 3 or tensors[scales].shape != tensors[codes].shape[:-1]:
        raise unfitting((codes, scales), tensors)
    *lead, num_blocks, num_bytes = tensors[codes].shape
    shape = (*lead, num_blocks * num_bytes * 2)
    return PackedWeight("float4", codes, scales, shape, 2 * num_bytes, (1, 2 * num_bytes), transposed=True)


def _compressed(path: str, tensors: Mapping[str, TensorHeader], quantization: Quantization) -> PackedWeight:
    """Returns a weight of compressed-tensors whose codes are packed into bytes or into 32-bit integers."""
    codes, scales = f"{path}.weight_packed", f"{path}.weight_scale"
    if scales not in tensors:
        raise ValueError(f"{codes} has no scales in {scales}: download the model again")
    others = {"divisor": "weight_global_scale", "zero_points": "weight_zero_point"}
    others |= {"true_shape": "weight_shape", "groups": "weight_g_idx"}
    beside = {key: f"{path}.{leaf}" if f"{path}.{leaf}" in tensors else None for key, leaf in others.items()}
    *rows, columns = _matrix(codes, scales, tensors)
    groups = tensors[scales].shape[-1] if tensors[scales].shape else 1
    has_float6 = any(each.is_float for each in quantization.groupings_of(path))
    if tensors[codes].dtype == "U8" and has_float6 and columns == 24 * groups:
        plain = PackedWeight("float6", codes, scales, (*rows, columns * 4 // 3), 4, (1, 1), elements=3)
    elif tensors[codes].dtype == "U8":
        plain = PackedWeight("float4", codes, scales, (*rows, 2 * columns), 2, (1, 1))
    elif tensors[codes].dtype not in _WORDS:
        raise unfitting((codes, scales), tensors)
    else:
        bits = _bits(path, columns, groups, quantization)
        plain = _integers(bits, codes, scales, (*rows, columns * 32 // bits))
    zero_points = beside["zero_points"]
    is_packed = zero_points is not None and tensors[zero_points].dtype == "I32"
    found = replace(plain, block=_block(plain, tensors[scales].shape, quantization), **beside)
    return _checked(replace(found, zero_point_axis=-2 if is_packed else None), tensors)


def _matrix(codes: str, scales: str, tensors: Mapping[str, TensorHeader]) -> tuple[int, ...]:
    """Returns the shape of codes, which have rows and columns. Raises ValueError if they have not."""
    if len(tensors[codes].shape) < 2:
        raise unfitting((codes, scales), tensors)
    return tensors[codes].shape


def _integers(bits: int, codes: str, scales: str, shape: tuple[int, ...]) -> PackedWeight:
    """Returns a weight whose codes are packed into 32-bit integers, across their borders if they do not divide them."""
    numbers, elements = (32 // bits, 1) if 32 % bits == 0 else (32, bits)
    return PackedWeight("integer", codes, scales, shape, numbers, (1, 1), bits, elements)


def _bits(path: str, columns: int, num_groups: int, quantization: Quantization) -> int:
    """Returns the bits of a code that fit the numbers of 32-bit integers and of scales in a row."""
    groupings = [each for each in quantization.groupings_of(path) if not each.is_float]
    fitting = {
        each.bits
        for each in groupings
        if not each.size or _fits(columns * 32 // each.bits, 32 / each.bits, each.size, num_groups)
    }
    if len(fitting) == 1:
        return fitting.pop()
    known = ", ".join(f"{each.bits} bits in groups of {each.size or 'a row'}" for each in groupings) or "no bits"
    raise ValueError(
        f"{path}: {columns} integers with {num_groups} scales in a row fit {len(fitting)} of what quantization_config"
        f" says, {known}: use another release"
    )


def _of_gptq_or_awq(path: str, tensors: Mapping[str, TensorHeader], quantization: Quantization) -> PackedWeight:
    """Returns a weight of [inputs, outputs] in files, with packed zero points for each group of inputs.

    GPTQ packs codes along inputs, AWQ along outputs.
    """
    codes, scales, zero_points = (f"{path}.{leaf}" for leaf in ("qweight", "scales", "qzeros"))
    if missing := [name for name in (scales, zero_points) if name not in tensors]:
        raise ValueError(f"{codes} has no {missing[0]}: download the model again, or use another release")
    of_codes, of_scales, of_zeros = (tensors[name].shape for name in (codes, scales, zero_points))
    if {len(of_codes), len(of_scales), len(of_zeros)} != {2} or tensors[codes].dtype != "I32":
        raise unfitting((codes, scales, zero_points), tensors)
    if of_codes[1] == of_scales[1]:
        bits = of_zeros[1] * 32 // max(1, of_scales[1])
        if bits not in GPTQ_BITS or of_zeros != (of_scales[0], of_scales[1] * bits / 32) or of_codes[0] * 32 % bits:
            raise unfitting((codes, scales, zero_points), tensors)
        plain = _integers(bits, codes, scales, (of_codes[1], of_codes[0] * 32 // bits))
        groups = f"{path}.g_idx" if f"{path}.g_idx" in tensors else None
        plain = replace(plain, is_mirrored=True, groups=groups, low_zero_points=quantization.low_zero_points)
        block, axis = _block(plain, of_scales[::-1], quantization), -2
    else:
        if of_scales != (of_zeros[0], 8 * of_codes[1]) or of_zeros[1] != of_codes[1]:
            raise unfitting((codes, scales, zero_points), tensors)
        plain = replace(_integers(4, codes, scales, of_scales[1:]), shape=(of_codes[0], of_scales[1]))
        plain = replace(plain, order=_AWQ_ORDER, transposed=True)
        block, axis = _block(plain, of_scales, quantization), -1
    return _checked(replace(plain, block=block, zero_points=zero_points, zero_point_axis=axis), tensors)


def unfitting(names: Sequence[str], tensors: Mapping[str, TensorHeader]) -> ValueError:
    """Returns an error that names these tensors and their sizes."""
    sizes = ", ".join(f"{name} of {tensors[name].dtype} {_sized(tensors[name].shape)}" for name in names)
    return ValueError(f"these do not fit together: {sizes}: download the model again, or use another release")


def _sized(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "1"


def _of_bitsandbytes(codes: str, tensors: Mapping[str, TensorHeader]) -> TableWeight:
    """Returns a weight of 4 bits, whose codes may be stored as numbers of another dtype."""
    states = [name for kind in ("nf4", "fp4") if (name := f"{codes}.quant_state.bitsandbytes__{kind}") in tensors]
    scales, table = f"{codes}.absmax", f"{codes}.quant_map"
    if not states or table not in tensors:
        raise ValueError(f"{codes} has no quant_state or no quant_map: download the model again")
    if prod(tensors[codes].shape) != max(tensors[codes].shape, default=0) or tensors[states[0]].dtype != "U8":
        raise unfitting((codes, states[0]), tensors)
    nested = (f"{codes}.nested_absmax", f"{codes}.nested_quant_map")
    is_nested = tensors[scales].dtype == "U8"
    if is_nested and not tensors.keys() >= {*nested}:
        raise ValueError(f"{scales} has no {nested[0]} or no {nested[1]}: download the model again")
    num_bytes = prod(tensors[codes].shape) * _BYTES.get(tensors[codes].dtype, 1)
    return TableWeight(codes, scales, table, states[0], 2 * num_bytes, *(nested if is_nested else (None, None)))


def _of_torchao(
    codes: str, tensors: Mapping[str, TensorHeader], quantization: Quantization
) -> tuple[str, PackedWeight]:
    """Returns the name of a weight, and its codes of 8 bits in the layout that does not depend on a device."""
    path, _, leaf = codes.rpartition(".")
    own = leaf.removeprefix("_").removesuffix("_qdata")
    scales, zero_points = f"{path}._{own}_scale", f"{path}._{own}_zero_point"
    if tensors[codes].dtype == "I8" and zero_points in tensors and tensors[zero_points].dtype in _BYTES:
        raise ValueError(f"{codes}: {conversion_error('torchao INT4')}")
    if tensors[codes].dtype not in ("I8", "F8_E4M3", "F8_E5M2") or scales not in tensors:
        raise ValueError(
            f"{codes} is packed as {tensors[codes].dtype} of {_sized(tensors[codes].shape)}, in the layout of one "
            "device's kernels: use a release in int8, float8 or bfloat16"
        )
    kind = "integer" if tensors[codes].dtype == "I8" else "float8"
    plain = PackedWeight(kind, codes, scales, _matrix(codes, scales, tensors), 1, (1, 1), bits=8)
    plain = replace(plain, zero_points=zero_points if zero_points in tensors else None)
    return f"{path}.{own}", _checked(replace(plain, block=_block(plain, tensors[scales].shape, quantization)), tensors)


def _scaled(codes: str, scales: str, tensors: Mapping[str, TensorHeader], quantization: Quantization) -> PackedWeight:
    """Returns a weight whose codes have its own name."""
    dtype, shape = tensors[codes].dtype, _matrix(codes, scales, tensors)
    path = codes.rpartition(".")[0]
    factor, zero_points, layout = f"{scales}_2", f"{path}.weight_zero_point", f"{path}.weight_format"
    if dtype == "U8" and tensors[scales].dtype not in _FLOAT4_SCALES:
        raise ValueError(f"{codes} has codes of 4 bits in an order that is not known: use another release")
    if dtype == "U8" or (dtype == "I8" and quantization.method == "fp8"):
        packed = PackedWeight("float4", codes, scales, (*shape[:-1], 2 * shape[-1]), 2, (1, 1))
    else:
        packed = PackedWeight("float8" if dtype != "I8" else "integer", codes, scales, shape, 1, (1, 1), bits=8)
    found = replace(
        packed,
        block=_block(packed, tensors[scales].shape, quantization),
        factor=factor if factor in tensors else None,
        denominator=_LARGEST_INT8 if scales.endswith(".SCB") else 1,
        zero_points=zero_points if zero_points in tensors else None,
        layout=layout if layout in tensors else None,
    )
    return _checked(found, tensors)


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
    for each in quantization.groupings_of(packed.codes.rpartition(".")[0]) if packed.kind == "integer" else ():
        per_element = packed.numbers / packed.elements
        if each.size and rows == across and _fits(columns, per_element, each.size, along):
            return 1, each.size
    if not across or not along or rows % across or columns % along:
        raise ValueError(f"{packed.codes} of {rows} x {columns} has {across} x {along} scales: use another release")
    return rows // across, columns // along


def _fits(columns: int, per_element: float, size: int, num_groups: int) -> bool:
    """True if there can be as many groups of this size in a row, whose last element may be padded."""
    return ceil((columns - per_element + 1) / size) <= num_groups <= ceil(columns / size)


def _checked(packed: PackedWeight, tensors: Mapping[str, TensorHeader]) -> PackedWeight:
    """Returns the weight.

    Raises:
        ValueError: it has no numbers, or not as many zero points or groups of columns as it needs.
    """
    if not packed.num_numbers:
        codes = tensors[packed.codes]
        raise ValueError(
            f"{packed.codes} of {codes.dtype} {_sized(codes.shape)} has no numbers: download the model again"
        )
    step = -1 if packed.is_mirrored else 1
    of_scales = tensors[packed.scales].shape[::step]
    num_matrices, grid = prod(packed.shape[:-2]), grid_of(packed.shape, of_scales)
    for name, size in ((packed.scales, prod(grid)), (packed.factor, 1), (packed.divisor, 1)):
        if name is not None and prod(tensors[name].shape) not in (size, size * num_matrices):
            raise unfitting((packed.codes, name), tensors)
    if packed.zero_points is not None:
        expected = [*grid]
        if packed.zero_point_axis is not None:
            expected[packed.zero_point_axis] = ceil(expected[packed.zero_point_axis] * packed.bits / 32)
            fits = [*tensors[packed.zero_points].shape[::step][-2:]] == expected
            fits = fits and tensors[packed.zero_points].dtype in _WORDS
        else:
            fits = prod(tensors[packed.zero_points].shape) == prod(of_scales)
        if not fits:
            raise unfitting((packed.codes, packed.scales, packed.zero_points), tensors)
    if packed.groups is not None:
        columns, of_groups = packed.shape[-1], tensors[packed.groups].shape
        padding = packed.numbers - 1 if packed.true_shape is not None else 0
        fits = len(of_groups) == 1 and columns - padding <= of_groups[0] <= columns
        if not fits or tensors[packed.groups].dtype not in ("I32", "I64"):
            raise unfitting((packed.codes, packed.groups), tensors)
    return packed

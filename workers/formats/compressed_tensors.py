"""compressed-tensors: codes packed into bytes (NVFP4, MXFP4, MXFP6) or into 32-bit integers (1 to 8 bits), settings for
groups of modules. Its codes in bytes of their own (FP8, INT8) are those of `plain_codes.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..shapes.packed_format import PackedFormat, Quantization, ReleasedFormat, Scales, Tensors
from ..shapes.quantization import REMEDY, check_not_converted, group_size_of, groups_of
from .packed_weight import WORDS, PackedWeight, block_of, checked, fits_groups, integer_weight, matrix_shape, unfitting

# Layouts in the order of one kernel.
_OTHER_LAYOUTS = ("marlin-24",)


def _find(name: str, tensors: Tensors, quantization: Quantization) -> tuple[str, PackedWeight] | None:
    path, _, leaf = name.rpartition(".")
    return (f"{path}.weight", _packed(path, tensors, quantization)) if leaf == "weight_packed" else None


def _packed(path: str, tensors: Tensors, quantization: Quantization) -> PackedWeight:
    codes, scales = f"{path}.weight_packed", f"{path}.weight_scale"
    if scales not in tensors:
        raise ValueError(f"{codes} has no scales in {scales}: download the model again")
    others = {"divisor": "weight_global_scale", "zero_points": "weight_zero_point"}
    others |= {"true_shape": "weight_shape", "groups": "weight_g_idx"}
    beside = {key: f"{path}.{leaf}" if f"{path}.{leaf}" in tensors else None for key, leaf in others.items()}
    *rows, columns = matrix_shape(codes, scales, tensors)
    groups = tensors[scales].shape[-1] if tensors[scales].shape else 1
    has_float6 = any(each.is_float for each in quantization.groupings_of(path))
    if tensors[codes].dtype == "U8" and has_float6 and columns == 24 * groups:
        plain = PackedWeight("float6", codes, scales, (*rows, columns * 4 // 3), 4, (1, 1), elements=3)
    elif tensors[codes].dtype == "U8":
        plain = PackedWeight("float4", codes, scales, (*rows, 2 * columns), 2, (1, 1))
    elif tensors[codes].dtype not in WORDS:
        raise unfitting((codes, scales), tensors)
    else:
        bits = _bits(path, columns, groups, quantization)
        plain = integer_weight(bits, codes, scales, (*rows, columns * 32 // bits))
    zero_points = beside["zero_points"]
    is_packed = zero_points is not None and tensors[zero_points].dtype == "I32"
    found = replace(plain, block=block_of(plain, tensors[scales].shape, quantization), **beside)
    return checked(replace(found, zero_point_axis=-2 if is_packed else None), tensors)


def _bits(path: str, columns: int, num_groups: int, quantization: Quantization) -> int:
    """Returns the bits of a code that fit the numbers of 32-bit integers and of scales in a row."""
    groupings = [each for each in quantization.groupings_of(path) if not each.is_float]
    fitting = {
        each.bits
        for each in groupings
        if not each.size or fits_groups(columns * 32 // each.bits, 32 / each.bits, each.size, num_groups)
    }
    if len(fitting) == 1:
        return fitting.pop()
    known = ", ".join(f"{each.bits} bits in groups of {each.size or 'a row'}" for each in groupings) or "no bits"
    raise ValueError(
        f"{path}: {columns} integers with {num_groups} scales in a row fit {len(fitting)} of what quantization_config"
        f" says, {known}: use another release"
    )


def _settings(given: Any) -> Quantization:
    sparsity, transforms = given.get("sparsity_config"), given.get("transform_config")
    sparse = sparsity.get("format") if isinstance(sparsity, dict) else None
    for layout in (given.get("format"), sparse, *(each.get("format") for each in groups_of(given))):
        check_not_converted(layout)
        if layout in _OTHER_LAYOUTS:
            raise ValueError(f"weights packed as {layout} are not supported: {REMEDY}")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise ValueError(f"weights in a rotated basis (transform_config) are not supported: {REMEDY}")
    return Quantization()


def _kept(given: Any) -> Iterator[ReleasedFormat]:
    for group in groups_of(given):
        yield from _kept_of(group["weights"], str(group.get("format") or given.get("format")))


def _kept_of(weights: Any, layout: str) -> Iterator[ReleasedFormat]:
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


COMPRESSED_TENSORS = PackedFormat(_find, _settings, _kept)

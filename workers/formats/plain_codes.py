"""Codes under the name of their weight, and scales: FP8 of DeepSeek and others, MXFP8, NVFP4 of ModelOpt,
MXFP4 of Quark, INT8 of compressed-tensors and Quark.
"""

from dataclasses import replace

from ..shapes.packed_format import Quantization, Tensors
from .packed_weight import PackedWeight, block_of, checked, matrix_shape

_EIGHT_BIT = {"F8_E4M3", "F8_E5M2", "I8", "U8"}
_FLOAT4_SCALES = {"F8_E4M3", "F8_E8M0", "U8"}


def find_plain_codes(name: str, tensors: Tensors, quantization: Quantization) -> tuple[str, PackedWeight] | None:
    """Finds codes of 8 bits, or two of 4 bits in a byte."""
    if tensors[name].dtype not in _EIGHT_BIT:
        return None
    path, _, leaf = name.rpartition(".")
    others = (f"{path}.scale", f"{path}.qscale_weight") if leaf == "weight" else ()
    scales = next((each for each in (f"{name}_scale_inv", f"{name}_scale", *others) if each in tensors), None)
    return None if scales is None else (name, plain_weight(name, scales, tensors, quantization))


def plain_weight(codes: str, scales: str, tensors: Tensors, quantization: Quantization) -> PackedWeight:
    """Returns a weight whose codes have its own name."""
    dtype, shape = tensors[codes].dtype, matrix_shape(codes, scales, tensors)
    factor, zero_points = f"{scales}_2", f"{codes.rpartition('.')[0]}.weight_zero_point"
    if dtype == "U8" and tensors[scales].dtype not in _FLOAT4_SCALES:
        raise ValueError(f"{codes} has codes of 4 bits in an order that is not known: use another release")
    if dtype == "U8" or (dtype == "I8" and quantization.method == "fp8"):
        packed = PackedWeight("float4", codes, scales, (*shape[:-1], 2 * shape[-1]), 2, (1, 1))
    else:
        packed = PackedWeight("float8" if dtype != "I8" else "integer", codes, scales, shape, 1, (1, 1), bits=8)
    found = replace(
        packed,
        block=block_of(packed, tensors[scales].shape, quantization),
        factor=factor if factor in tensors else None,
        zero_points=zero_points if zero_points in tensors else None,
    )
    return checked(found, tensors)

"""torchao in 8 bits, in the layout that does not depend on a device."""

from dataclasses import replace

from ..shapes.packed_format import PackedFormat, Quantization, Tensors
from ..shapes.quantization import conversion_error
from .packed_weight import PackedWeight, block_of, checked, matrix_shape, sized

_FLOATS = {"BF16", "F16", "F32"}


def _find(name: str, tensors: Tensors, quantization: Quantization) -> tuple[str, PackedWeight] | None:
    path, _, leaf = name.rpartition(".")
    if not (leaf.startswith("_") and leaf.endswith("_qdata")):
        return None
    own, dtype = leaf.removeprefix("_").removesuffix("_qdata"), tensors[name].dtype
    scales, zero_points = f"{path}._{own}_scale", f"{path}._{own}_zero_point"
    if dtype == "I8" and zero_points in tensors and tensors[zero_points].dtype in _FLOATS:
        raise ValueError(f"{name}: {conversion_error('torchao INT4')}")
    if dtype not in ("I8", "F8_E4M3", "F8_E5M2") or scales not in tensors:
        raise ValueError(
            f"{name} is packed as {dtype} of {sized(tensors[name].shape)}, in the layout of one device's kernels: use a"
            " release in int8, float8 or bfloat16"
        )
    kind = "integer" if dtype == "I8" else "float8"
    plain = PackedWeight(kind, name, scales, matrix_shape(name, scales, tensors), 1, (1, 1), bits=8)
    plain = replace(plain, zero_points=zero_points if zero_points in tensors else None)
    return f"{path}.{own}", checked(replace(plain, block=block_of(plain, tensors[scales].shape, quantization)), tensors)


TORCHAO = PackedFormat(_find)

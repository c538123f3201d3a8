"""MXFP4 of gpt-oss: the matrices of all experts of a layer, with a power of two for each 32 floats of 4 bits."""

from ..shapes.packed_format import PackedFormat, Quantization, ReleasedFormat, Tensors
from .packed_weight import PackedWeight, checked, unfitting


def _find(name: str, tensors: Tensors, quantization: Quantization) -> tuple[str, PackedWeight] | None:
    """Finds a matrix of all experts with [experts, outputs, blocks, 16] codes, two in a byte."""
    weight = name.removesuffix("_blocks")
    scales = f"{weight}_scales"
    if weight == name or scales not in tensors:
        return None
    if len(tensors[name].shape) < 3 or tensors[scales].shape != tensors[name].shape[:-1]:
        raise unfitting((name, scales), tensors)
    *lead, num_blocks, num_bytes = tensors[name].shape
    shape, numbers = (*lead, num_blocks * num_bytes * 2), 2 * num_bytes
    packed = PackedWeight("float4", name, scales, shape, numbers, (1, numbers), transposed=True)
    return weight, checked(packed, tensors)


MXFP4 = PackedFormat(_find, kept=lambda given: [ReleasedFormat("float4", "power of two", (1, 32))])

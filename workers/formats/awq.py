"""AWQ in 4 bits, packed for `gemm`: codes along outputs, and packed zero points for each group of inputs."""

from dataclasses import replace
from typing import Any

from ..shapes.packed_format import PackedFormat, Quantization, Tensors
from ..shapes.quantization import check_known
from .gptq import grouping_in_bits, names_beside
from .packed_weight import PackedWeight, block_of, checked, integer_weight, unfitting

# Numbers that AutoAWQ packs into an integer of 32 bits: their places from the lowest bits.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _find(name: str, tensors: Tensors, quantization: Quantization) -> tuple[str, PackedWeight] | None:
    """Finds a weight of [inputs, outputs] in files."""
    path, _, leaf = name.rpartition(".")
    if leaf != "qweight":
        return None
    codes, scales, zero_points = names = names_beside(path, tensors)
    of_codes, of_scales, of_zeros = (tensors[each].shape for each in names)
    if of_codes[1] == of_scales[1]:
        return None  # GPTQ's
    if of_scales != (of_zeros[0], 8 * of_codes[1]) or of_zeros[1] != of_codes[1]:
        raise unfitting(names, tensors)
    plain = integer_weight(4, codes, scales, (of_codes[0], of_scales[1]))
    plain = replace(plain, order=_ORDER, transposed=True)
    block = block_of(plain, of_scales, quantization)
    return f"{path}.weight", checked(replace(plain, block=block, zero_points=zero_points, zero_point_axis=-1), tensors)


def _settings(given: Any) -> Quantization:
    check_known("version", str(given.get("version", given.get("format", "gemm"))).lower(), ("gemm",))
    return Quantization(groupings=(grouping_in_bits(given, (4,)),))


AWQ = PackedFormat(_find, _settings)

"""GPTQ in 2 to 8 bits, also by AutoRound: codes along inputs, and packed zero points for each group of inputs."""

from dataclasses import replace
from typing import Any

from ..shapes.packed_format import Grouping, PackedFormat, Quantization, Tensors
from ..shapes.quantization import REMEDY, check_known, group_size_of
from .packed_weight import PackedWeight, block_of, checked, integer_weight, unfitting

_BITS = (2, 3, 4, 5, 6, 7, 8)
# How AutoRound names the packing of GPTQ with zero points that are one too low. AutoRound and vLLM take it as default.
_LOW_ZERO_POINTS = "auto_round:auto_gptq"
_AUTO_ROUND = (
    *("auto_round", _LOW_ZERO_POINTS, "auto_round:gptqmodel", "auto_round:auto_awq"),
    *("auto_round:llm_compressor", "auto_round:fp8", "auto_round:fp8_static"),
)


def _find(name: str, tensors: Tensors, quantization: Quantization) -> tuple[str, PackedWeight] | None:
    """Finds a weight of [inputs, outputs] in files."""
    path, _, leaf = name.rpartition(".")
    if leaf != "qweight":
        return None
    codes, scales, zero_points = names = names_beside(path, tensors)
    of_codes, of_scales, of_zeros = (tensors[each].shape for each in names)
    if of_codes[1] != of_scales[1]:
        return None
    bits = of_zeros[1] * 32 // max(1, of_scales[1])
    if bits not in _BITS or of_zeros != (of_scales[0], of_scales[1] * bits / 32) or of_codes[0] * 32 % bits:
        raise unfitting(names, tensors)
    plain = integer_weight(bits, codes, scales, (of_codes[1], of_codes[0] * 32 // bits))
    groups = f"{path}.g_idx" if f"{path}.g_idx" in tensors else None
    plain = replace(plain, is_mirrored=True, groups=groups, low_zero_points=quantization.low_zero_points)
    block = block_of(plain, of_scales[::-1], quantization)
    return f"{path}.weight", checked(replace(plain, block=block, zero_points=zero_points, zero_point_axis=-2), tensors)


def names_beside(path: str, tensors: Tensors) -> tuple[str, str, str]:
    """Returns the names of codes, scales and zero points of a linear layer by GPTQ or AWQ, all matrices.

    Raises:
        ValueError: some are missing, or no matrices.
    """
    codes, scales, zero_points = (f"{path}.{leaf}" for leaf in ("qweight", "scales", "qzeros"))
    if missing := [name for name in (scales, zero_points) if name not in tensors]:
        raise ValueError(f"{codes} has no {missing[0]}: download the model again, or use another release")
    if {len(tensors[name].shape) for name in (codes, scales, zero_points)} != {2} or tensors[codes].dtype != "I32":
        raise unfitting((codes, scales, zero_points), tensors)
    return codes, scales, zero_points


def grouping_in_bits(given: Any, known: tuple[int, ...]) -> Grouping:
    """Returns how all modules are packed, in one of the known numbers of bits. Raises ValueError if it is another."""
    bits = given.get("bits", given.get("w_bit", 4))
    if type(bits) is not int or bits not in known:
        raise ValueError(f"quantization_config has bits {bits!r}: {REMEDY}")
    return Grouping(bits, group_size_of("group_size", given.get("group_size", given.get("q_group_size"))))


def _settings(given: Any) -> Quantization:
    version = given.get("checkpoint_format", given.get("format", "gptq"))
    check_known("checkpoint_format", version, ("gptq", "gptq_v2"))
    return Quantization(groupings=(grouping_in_bits(given, _BITS),), low_zero_points=version != "gptq_v2")


def _settings_of_auto_round(given: Any) -> Quantization:
    packing = given.get("packing_format")
    packing = _LOW_ZERO_POINTS if packing in (None, "auto") else packing
    check_known("packing_format", packing, _AUTO_ROUND)
    return Quantization(groupings=(grouping_in_bits(given, _BITS),), low_zero_points=packing == _LOW_ZERO_POINTS)


GPTQ = PackedFormat(_find, _settings)
AUTO_ROUND = PackedFormat(_find, _settings_of_auto_round)

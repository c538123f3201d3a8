"""bitsandbytes in 4 bits, whose codes are places in a table (NF4, FP4), and in 8 bits with a scale for each row."""

from dataclasses import dataclass, replace
from math import prod

from ..shapes.packed_format import PackedFormat, Quantization, Tensors
from .packed_weight import PackedWeight, unfitting
from .plain_codes import plain_weight

# Numbers of 8 bits are divided by the largest code.
_LARGEST = 127
_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


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
    """The numbers that the codes have room for."""
    nested_scales: str | None = None
    """The scales of blocks of scales."""
    nested_table: str | None = None

    @property
    def names(self) -> set[str]:
        """The tensors in files that make up this weight."""
        every = (self.codes, self.scales, self.table, self.state, self.nested_scales, self.nested_table)
        return {name for name in every if name is not None}


def _find(name: str, tensors: Tensors, quantization: Quantization) -> tuple[str, TableWeight | PackedWeight] | None:
    if f"{name}.absmax" in tensors:
        return name, _in_4_bits(name, tensors)
    path, _, leaf = name.rpartition(".")
    if leaf != "weight" or tensors[name].dtype != "I8" or (scales := f"{path}.SCB") not in tensors:
        return None
    layout = f"{path}.weight_format"
    plain = plain_weight(name, scales, tensors, quantization)
    return name, replace(plain, denominator=_LARGEST, layout=layout if layout in tensors else None)


def _in_4_bits(codes: str, tensors: Tensors) -> TableWeight:
    """Returns a weight whose codes may be stored as numbers of another dtype."""
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


BITSANDBYTES = PackedFormat(_find)

"""Weights of HQQ: a matrix is held as one of groups, in which distant rows share bytes, and groups share scales."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...shapes.packed_weights import GroupedWeight
from .stored_tensor import Dequantized, StoredTensor


class GroupedTensor(Dequantized):
    """A matrix whose rows follow each other in the rows of a matrix of groups."""

    def __init__(
        self, name: str, packed: GroupedWeight, stored: Mapping[str, StoredTensor], dtype: torch.dtype
    ) -> None:
        """name: of the weight. Raises ValueError if its tensors do not fit together."""
        self._packed, self._dtype, self._codes = packed, dtype, stored[packed.codes]
        self._scales, self._zeros = (stored[each] for each in (packed.scales, packed.zero_points))
        self._width = self._codes.get_shape()[1]
        shape, bits, axis = (stored[each][...].flatten()[:3].tolist() for each in packed.settings)
        if len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] != packed.num_numbers:
            raise ValueError(f"{packed.settings[0]} is {shape}, but {name} has {packed.num_numbers} numbers: {_REMEDY}")
        if (bits, axis) != ([packed.bits], [packed.axis]):
            raise ValueError(
                f"{', '.join(packed.settings[1:])} are {bits} and {axis}, but {packed.codes} has {packed.bits} bits in"
                f" groups along {packed.axis}: {_REMEDY}"
            )
        self._shape = [int(each) for each in shape]

    def _rows(self, rows: slice) -> Tensor:
        first, last = rows.start * self._shape[1], rows.stop * self._shape[1]
        held = slice(first // self._width, -(-last // self._width))
        of_groups = (held, slice(None)) if self._packed.axis else (slice(None), slice(None))
        scales, zeros = (each[of_groups].float() for each in (self._scales, self._zeros))
        numbers = (self._unpacked(held) - zeros) * scales
        return numbers.flatten()[first - held.start * self._width :][: last - first].view(-1, self._shape[1])

    def _unpacked(self, rows: slice) -> Tensor:
        """Returns the codes of rows of groups as float32.

        The first rows are in the highest bits, and others in lower ones: a byte is read for each code.
        """
        height, bits, parts = self._codes.get_shape()[0], self._packed.bits, []
        for part in range(rows.start // height, -(-rows.stop // height)):
            own = slice(max(rows.start - part * height, 0), min(rows.stop - part * height, height))
            shift = bits * (self._packed.per_element - 1 - part)
            parts.append(self._codes[own] >> shift & (1 << bits) - 1)
        return torch.cat(parts).float()


_REMEDY = "download the model again"

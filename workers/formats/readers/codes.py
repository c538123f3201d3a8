"""Unpacks codes of 1 to 8 bits to the numbers that they stand for before they are scaled."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..packed_weight import PackedWeight

# The numbers of 4 bits, by code: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, E2M1).
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The numbers of 6 bits: a sign, two bits of exponent, three of mantissa (E2M3 of the same).
_FLOAT6 = [(each & 7) / 8 if each < 8 else (1 + (each & 7) / 8) * 2 ** ((each >> 3) - 1) for each in range(32)]


class Codes:
    """Knows how a weight's codes are packed along the last dimension of a tensor, the first in the lowest bits."""

    def __init__(self, packed: PackedWeight, dtype: str) -> None:
        """dtype: of the codes in files, as safetensors names it."""
        self._packed = packed
        self._table = None if packed.elements > 1 else _table(packed, dtype)

    def elements_of(self, columns: slice) -> slice:
        """Returns the elements that hold these columns, from `first_column` on."""
        numbers, elements = self._packed.numbers, self._packed.elements
        return slice(columns.start // numbers * elements, -(-columns.stop // numbers) * elements)

    def first_column(self, columns: slice) -> int:
        return columns.start - columns.start % self._packed.numbers

    def unpacked(self, codes: Tensor, plus_one: bool = False) -> Tensor:
        """Returns the numbers of [rows, elements] of codes as float32 [rows, numbers].

        plus_one: whether one is added to each code, the largest of which becomes zero.
        """
        bits, order = self._packed.bits, self._packed.order
        if self._packed.kind == "float6":
            return _of_float6(codes)
        if self._table is None:
            return _of_stream(codes, bits, int(plus_one)) - (1 << bits - 1)
        if plus_one:
            # Added to the whole integers, as it was subtracted: a zero borrowed from the next code.
            codes = (codes.long() + sum(1 << place for place in range(0, 32, bits))).int()
        numbers = looked_up(codes, self._table)
        return numbers.unflatten(1, (-1, len(order)))[..., order].flatten(1) if order else numbers


def looked_up(codes: Tensor, table: Tensor) -> Tensor:
    """Returns the numbers of [rows, elements] of codes by a table of those of each byte, as float32 [rows, numbers]."""
    of_bytes = codes.contiguous().view(torch.uint8).flatten().int()
    if table.shape[1] != 2:
        return table.index_select(0, of_bytes).view(len(codes), -1)
    # A pair of numbers is looked up as one complex number, several times as fast.
    return torch.view_as_real(torch.view_as_complex(table).index_select(0, of_bytes)).view(len(codes), -1)


def _table(packed: PackedWeight, dtype: str) -> Tensor:
    """Returns the numbers that each byte of codes stands for, the first in its lowest bits: [256, numbers]."""
    every = torch.arange(256, dtype=torch.uint8)
    if packed.kind == "float8":
        return every.view(torch.float8_e5m2 if dtype == "F8_E5M2" else torch.float8_e4m3fn).float().unsqueeze(1)
    if packed.kind == "float4":
        return torch.tensor(_FLOAT4)[torch.stack((every & 15, every >> 4), 1).int()]
    if dtype == "I8" and packed.bits == 8:
        return every.view(torch.int8).float().unsqueeze(1)
    shifts = torch.arange(0, 8, packed.bits, dtype=torch.uint8)
    return (every.unsqueeze(1) >> shifts & (1 << packed.bits) - 1).float() - (1 << packed.bits - 1)


def _of_stream(words: Tensor, bits: int, added: int) -> Tensor:
    """Returns the codes of 32-bit integers [rows, words], which continue in the next word, as float32.

    added: to each code.
    """
    units = F.pad(words.long() & 0xFFFFFFFF, (0, -words.shape[1] % bits)).unflatten(1, (-1, bits))
    two_words = units | F.pad(units, (0, 1))[..., 1:] << 32
    starts = torch.arange(0, 32 * bits, bits)
    codes = (two_words[..., starts // 32] >> starts % 32) + added & (1 << bits) - 1
    return codes.flatten(1).float()


def _of_float6(codes: Tensor) -> Tensor:
    """Returns the numbers of bytes [rows, elements], of which three hold four codes, as float32."""
    first, second, third = codes.int().unflatten(1, (-1, 3)).unbind(-1)
    four = (first | second << 8 | third << 16).unsqueeze(-1) >> torch.arange(0, 24, 6) & 63
    table = torch.tensor(_FLOAT6)
    return torch.cat((table, -table))[four].flatten(1)

"""Finds codes and scales of a release's format that stand for exactly the numbers of a weight.

The largest number of a block is one of few codes times the block's scale. Each possibility gives a scale that is right
to the precision of the numbers, which is enough to know all codes; the scales with which each code rounds to its number
are an interval, and one that is in the intervals of all codes gives the block back. Nothing is taken that does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...shapes.packed_format import Codes, ReleasedFormat
from .released import FLOAT4, PackedNumbers, ReleasedWeight, float_scales, matrices_of, parts

# Numbers whose intervals exist at a time: on the CPU they stay in a core's cache.
_ON_CPU, _ON_DEVICES = 1 << 17, 1 << 22
_LARGEST_FLOAT8 = 448.0
# Sizes of a block's largest code, likely ones first. Others need not be tried: with all codes doubled until the largest
# has the highest exponent, and the scale halved as often, the numbers are the same.
_OF_FLOAT8 = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)
_LARGEST: Mapping[Codes, Sequence[float]] = {
    "float4": (6.0, 4.0),
    "float8": _OF_FLOAT8,
    "integer": (7.0, 8.0, 6.0, 5.0, 4.0),
}
# Scales that are the smallest numbers of float8 cannot be halved, so that these codes can be largest, too.
_MORE_OF_FLOAT4 = (3.0, 2.0, 1.5, 1.0, 0.5)
# Scales of float8 are known to the precision of bfloat16, which is a quarter of this.
_NEAR = 2**-7


def pack(weight: Tensor, formats: Sequence[ReleasedFormat]) -> ReleasedWeight | None:
    """Returns a weight [..., rows, columns] packed in one of the formats, None if its numbers are not of any.

    The weight is contiguous, or its last two dimensions are transposed.
    """
    is_transposed = not weight.is_contiguous()
    stored = matrices_of((weight.mT if is_transposed else weight).contiguous())
    if stored.numel() == 0:
        return None
    for format in formats:
        for blocks_are_flipped in (is_transposed, not is_transposed):
            packed = _packed(stored, format, blocks_are_flipped)
            if packed is not None:
                return ReleasedWeight(packed, weight.shape, weight.dtype, is_transposed)
    return None


def _packed(stored: Tensor, format: ReleasedFormat, are_flipped: bool) -> PackedNumbers | None:
    """Returns matrices [matrices, rows, columns] packed.

    Args:
        are_flipped: whether the format's rows are the columns here.
    """
    if stored.shape[2] * format.code_bits % 8:
        return None
    matrices = stored.mT if are_flipped else stored
    for block in format.blocks(*matrices.shape[1:]):
        if (found := _fitted(matrices, format, block)) is None:
            continue
        flipped = [each if each is None or not are_flipped else each.mT.contiguous() for each in found]
        codes, scales, factors = flipped
        assert codes is not None and scales is not None
        size = (block[1], block[0]) if are_flipped else block
        return PackedNumbers(format, size, _in_bytes(codes, format), scales, factors)
    return None


def _fitted(matrices: Tensor, format: ReleasedFormat, block: tuple[int, int]) -> list[Tensor | None] | None:
    """Returns codes, scales and factors of [matrices, rows, columns], None if there are none."""
    found, at_once = [], _ON_CPU if matrices.is_cpu else _ON_DEVICES
    for of_matrices, rows in parts(matrices.shape, block[0], at_once):
        part = matrices[of_matrices, rows]
        fitted = _fit(part.flatten(0, 1), format, block)
        if fitted is None:
            return None
        found.append([None if each is None else each.unflatten(0, (len(part), -1)) for each in fitted])
    return [None if each[0] is None else _joined(each, len(matrices)) for each in zip(*found, strict=True)]


def _joined(of_parts: Sequence[Tensor], num_matrices: int) -> Tensor:
    """Joins parts [matrices, rows, columns], each of some matrices or of some rows of one, in order."""
    return torch.cat([each.flatten(0, 1) for each in of_parts]).unflatten(0, (num_matrices, -1))


@dataclass(frozen=True)
class _Blocks:
    """Sizes of numbers by block [blocks, numbers], their signs, and the sizes between which numbers round to each."""

    sizes: Tensor
    are_negative: Tensor
    low: Tensor
    high: Tensor

    @staticmethod
    def of(numbers: Tensor, block: tuple[int, int]) -> "_Blocks":
        by_block = _by_block(numbers, block)
        sizes = by_block.abs()
        bits = sizes.view(torch.int16 if sizes.itemsize == 2 else torch.int32)
        below, above = ((bits + step).view(sizes.dtype).double() for step in (-1, 1))
        low, high = ((sizes.double() + each) / 2 for each in (below, above))
        is_zero = sizes == 0
        low, high = low.masked_fill_(is_zero, 0.0), high.masked_fill_(is_zero, torch.inf)
        return _Blocks(sizes, by_block.signbit(), low, high)

    def __getitem__(self, index: Tensor) -> "_Blocks":
        return _Blocks(self.sizes[index], self.are_negative[index], self.low[index], self.high[index])

    def codes(self, largest: float, kind: Codes) -> Tensor:
        """Returns the sizes of the codes, float32 [blocks, numbers], if the largest number has that code."""
        scaled = self.sizes.float() * (largest / self.sizes.amax(1, keepdim=True).float())
        return _nearest(scaled.nan_to_num(0.0), kind)

    def scales(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the least and greatest scale with which codes round to their numbers, float64 [blocks].

        Blocks of zeros have from 0 to infinity.
        """
        codes = codes.clamp(min=torch.finfo(codes.dtype).tiny)  # zeros fit all scales
        return (self.low / codes).amax(1), (self.high / codes).amin(1)

    def equal(self, codes: Tensor, scales: Tensor, kind: Codes) -> Tensor:
        """True for each block that codes times scales give back, bit for bit: [blocks]."""
        same = (codes * scales.unsqueeze(-1)).to(self.sizes.dtype) == self.sizes
        if kind == "integer":  # from -8 to 7, without a negative zero
            same &= torch.where(self.are_negative, codes > 0, codes < 8)
        return same.all(1)


def _fit(numbers: Tensor, format: ReleasedFormat, block: tuple[int, int]) -> list[Tensor | None] | None:
    """Returns codes (uint8), scales and factors of [rows, columns], None if there are none."""
    blocks, num_columns = _Blocks.of(numbers, block), numbers.shape[1]
    grid = -1, num_columns // block[1]
    fitted = _fit_rows(blocks, grid[1]) if format.scales == "float8" else _fit_blocks(blocks, format)
    if fitted is None:
        return None
    sizes, scales, factors = fitted
    assert sizes is not None and scales is not None
    codes = _codes(sizes, blocks.are_negative, format.codes)
    return [_by_row(codes, block, num_columns), scales.view(grid), factors]


def _fit_blocks(blocks: _Blocks, format: ReleasedFormat) -> list[Tensor | None] | None:
    """Returns the sizes of codes [blocks, numbers], scales [blocks], None if there are none, and no factors."""
    sizes = torch.zeros_like(blocks.sizes, dtype=torch.float32)
    scales = torch.zeros(len(sizes), dtype=_DTYPES[format.scales], device=sizes.device)
    left = torch.arange(len(sizes), device=sizes.device)
    for largest in _LARGEST[format.codes]:
        of_left = blocks if len(left) == len(sizes) else blocks[left]
        codes = of_left.codes(largest, format.codes)
        found = _stored(_middle(*of_left.scales(codes)), format)
        fits = of_left.equal(codes, float_scales(found, format.scales), format.codes)
        sizes[left[fits]], scales[left[fits]] = codes[fits], found[fits]
        left = left[~fits]
        if not len(left):
            return [sizes, scales, None]
    return None


_DTYPES = {
    "power of two": torch.uint8,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8": torch.float8_e4m3fn,
}


def _stored(scales: Tensor, format: ReleasedFormat) -> Tensor:
    """Returns the nearest scales of the format."""
    if format.scales != "power of two":
        return scales.to(_DTYPES[format.scales])
    return (scales.log2().round() + 127).clamp(1, 254).to(torch.uint8)


def _middle(least: Tensor, greatest: Tensor) -> Tensor:
    """Returns the scales amid intervals, 1 where any would do."""
    return torch.where(greatest.isinf(), 1.0, (least + greatest) / 2)


def _by_block(numbers: Tensor, block: tuple[int, int]) -> Tensor:
    """Reorders [rows, columns] to [blocks, numbers]."""
    height, width = block
    by_block = numbers.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2)
    return by_block.reshape(-1, height * width)


def _by_row(of_blocks: Tensor, block: tuple[int, int], num_columns: int) -> Tensor:
    """Reverses `_by_block`."""
    height, width = block
    return of_blocks.view(-1, num_columns // width, height, width).transpose(1, 2).reshape(-1, num_columns)


def _nearest(numbers: Tensor, kind: Codes) -> Tensor:
    """Returns the sizes of the nearest codes, for sizes of any numbers."""
    if kind == "float8":
        return numbers.clamp(max=_LARGEST_FLOAT8).to(torch.float8_e4m3fn).float()
    if kind == "integer":
        return numbers.round()
    sizes = torch.tensor(FLOAT4, device=numbers.device)
    return sizes[torch.bucketize(numbers, (sizes[1:] + sizes[:-1]) / 2)]


def _codes(sizes: Tensor, are_negative: Tensor, kind: Codes) -> Tensor:
    """Returns codes in a byte each."""
    if kind == "float4":
        sizes_of_codes = torch.tensor(FLOAT4, device=sizes.device)
        return (torch.searchsorted(sizes_of_codes, sizes) + 8 * are_negative).to(torch.uint8)
    signed = torch.where(are_negative, -sizes, sizes)
    return signed.to(torch.float8_e4m3fn).view(torch.uint8) if kind == "float8" else (signed + 8).to(torch.uint8)


def _in_bytes(codes: Tensor, format: ReleasedFormat) -> Tensor:
    if format.codes == "float8":
        return codes.view(torch.float8_e4m3fn)
    return codes[..., 0::2] | codes[..., 1::2] << 4


# Scales that are float8 numbers times a factor of their row


@dataclass(frozen=True)
class _Possible:
    """The codes and scales that each block of some rows can have, by its largest code.

    codes: [possibilities, rows, blocks, numbers]. scales: those amid the possible ones, float32 [possibilities, rows,
    blocks]. low, high: float64, the numbers that round to the least and to the greatest of them. fits: whether codes
    and scales give the block back.
    """

    codes: Tensor
    scales: Tensor
    low: Tensor
    high: Tensor
    fits: Tensor

    @staticmethod
    def of(blocks: _Blocks, num_blocks: int, largest: Sequence[float]) -> "_Possible":
        found = [_possible(blocks, each) for each in largest]
        return _Possible(*(torch.stack(each).unflatten(1, (-1, num_blocks)) for each in zip(*found, strict=True)))

    def at(self, chosen: Tensor) -> Iterator[Tensor]:
        """Yields codes, low and high of the chosen possibility of each block, int64 [rows, blocks]."""
        for each in (self.codes, self.low, self.high):
            index = chosen.view(1, *chosen.shape, *[1] * (each.dim() - 3)).expand(1, *each.shape[1:])
            yield each.gather(0, index).squeeze(0)


def _possible(blocks: _Blocks, largest: float) -> tuple[Tensor, ...]:
    codes = blocks.codes(largest, "float4")
    least, greatest = blocks.scales(codes)
    scales = _middle(least, greatest).float()
    # The least and the greatest float32 within.
    first, last = least.float(), greatest.float()
    first = torch.where(first.double() < least, first.nextafter(first.new_tensor(torch.inf)), first)
    last = torch.where(last.double() > greatest, last.nextafter(last.new_tensor(0.0)), last)
    low = (first.double() + first.nextafter(first.new_tensor(0.0)).double()) / 2
    high = (last.double() + last.nextafter(last.new_tensor(torch.inf)).double()) / 2
    return codes, scales, low, high, blocks.equal(codes, scales, "float4")


def _fit_rows(blocks: _Blocks, num_blocks: int) -> list[Tensor | None] | None:
    """Returns the sizes of codes [blocks, numbers], scales [blocks] and factors [rows, 1], None if there are none."""
    num_rows = len(blocks.sizes) // num_blocks
    sizes = torch.zeros_like(blocks.sizes, dtype=torch.float32).view(num_rows, num_blocks, -1)
    scales = torch.zeros(num_rows, num_blocks, dtype=torch.float8_e4m3fn, device=sizes.device)
    factors = torch.zeros(num_rows, 1, dtype=torch.float64, device=sizes.device)
    left = torch.arange(num_rows, device=sizes.device)
    for largest in (_LARGEST["float4"], (*_LARGEST["float4"], *_MORE_OF_FLOAT4)):
        of_rows = left.unsqueeze(1) * num_blocks + torch.arange(num_blocks, device=left.device)
        of_left = blocks[of_rows.flatten()]
        possible = _Possible.of(of_left, num_blocks, largest)
        is_zero = (of_left.sizes == 0).all(1).view(-1, num_blocks)
        for largest_scale in _OF_FLOAT8:
            fits, *found = _row_factors(of_left, possible, is_zero, largest_scale)
            kept = left.new_zeros(num_rows, dtype=torch.bool)
            kept[left[fits]] = True
            sizes[kept], scales.view(torch.uint8)[kept], factors[kept] = (each[fits] for each in found)
            if (factors[left] > 0).all():
                break
        left = left[factors[left, 0] == 0]
        if not len(left):
            return [sizes.flatten(0, 1), scales.flatten(), factors]
    return None


def _row_factors(blocks: _Blocks, possible: _Possible, is_zero: Tensor, largest_scale: float) -> tuple[Tensor, ...]:
    """Returns for each row whether it fits if its largest scale is this number of float8, its codes, scales (bytes) and
    factor."""
    first = possible.fits.int().argmax(0, keepdim=True)
    typical = possible.scales.gather(0, first).squeeze(0).masked_fill(is_zero, 0.0)
    factors = (typical.amax(1, keepdim=True) / largest_scale).double()
    factors = torch.where(factors > 0, factors, 1.0)
    wanted = possible.scales / factors.float()
    nearest = _nearest(wanted, "float8")
    is_near = (nearest - wanted).abs() <= _NEAR * wanted
    chosen = (is_near & possible.fits).int().argmax(0)
    codes, low, high = possible.at(chosen)
    scales = nearest.gather(0, chosen.unsqueeze(0)).squeeze(0).masked_fill(is_zero, 0.0)
    least = torch.where(is_zero, 0.0, low / scales).amax(1, keepdim=True)
    factors = _middle(least, torch.where(is_zero, torch.inf, high / scales).amin(1, keepdim=True))
    exact = float_scales(scales, "float8", factors)
    fits = blocks.equal(codes.flatten(0, 1), exact.flatten(), "float4").view(is_zero.shape).all(1)
    return fits, codes, scales.to(torch.float8_e4m3fn).view(torch.uint8), factors

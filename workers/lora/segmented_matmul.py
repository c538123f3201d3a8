"""Multiplies the rows of several adapters each by its adapter's matrices, for all products of the low-rank terms.

The fastest way depends on how many rows each adapter has; `choose_matmul` chooses it, once for all layers of a pass.
Every way keeps the adapters apart: no number of one enters a sum of another, so a NaN stays with its adapter.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from ..ops.kernels import kernels_for

# On the CPU, copying so few rows into a padded batch costs less than the calls that it saves.
_FEW_ROWS, _LOW_RANK = 128, 64


class SegmentedMatmul(Protocol):
    """The rows of n adapters, concatenated."""

    @property
    def scale(self) -> float | Tensor:
        """The scales of the rows' adapters: a number if all are equal, else [rows, 1]."""
        ...

    def times(self, x: Tensor, matrices: Tensor, /, *, out: Tensor | None = None) -> Tensor:
        """Multiplies each row of x [rows, p] by its adapter's [p, q]. Returns [rows, q], in `out` if given."""
        ...

    def add_product(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        """Adds to y [rows, q] the product of each row of x [rows, p] with its adapter's a [p, R] and b [R, q]."""
        ...

    def add_outer(self, totals: Sequence[Tensor], left: Tensor, right: Tensor) -> None:
        """Adds to each adapter's total left^T right over its rows, summed in float32.

        Args:
            totals: float32 [rank, q]; columns of `left` beyond the rank are left out.
            left: [rows, p].
            right: [rows, q].
        """
        ...


def choose_matmul(
    lengths: Sequence[int], scales: Sequence[float], device: torch.device, aligned: bool
) -> SegmentedMatmul:
    """Returns the fastest way to multiply the rows of these adapters.

    Args:
        lengths: rows of each adapter, all positive.
        aligned: whether `RaggedLengths` can be used.
    """
    if len(lengths) == 1:
        return SingleAdapter(scales[0])
    if len(set(lengths)) == 1:
        return EqualLengths(lengths, scales, device)
    if not aligned or (device.type == "cpu" and sum(lengths) <= _FEW_ROWS):
        return PaddedLengths(lengths, scales, device)
    return RaggedLengths(lengths, scales, device)


def stack(matrices: Sequence[Tensor]) -> Tensor:
    """Stacks each adapter's [rank, q] to [n, highest rank, q]; rows that lower ranks lack are zeros.

    The matrix of a single adapter stays as it is.
    """
    if len(matrices) == 1:
        return matrices[0]
    # A multiple of 8 ranks is a multiple of 16 bytes.
    rank = -(-max(len(matrix) for matrix in matrices) // 8) * 8
    if all(len(matrix) == rank for matrix in matrices):
        # Takes a third of the time of torch.stack.
        return torch.cat(list(matrices)).view(len(matrices), rank, -1)
    stacked = matrices[0].new_zeros(len(matrices), rank, matrices[0].shape[1])
    places = [padded[: len(matrix)] for padded, matrix in zip(stacked.unbind(), matrices, strict=True)]
    torch.ops.aten._foreach_copy_.default(places, list(matrices))
    return stacked


@dataclass(frozen=True)
class SingleAdapter:
    """The rows of a single adapter, whose matrices are used in place."""

    scale: float

    times = staticmethod(torch.mm)

    def add_product(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        kernels = kernels_for(y, x, a, b) if len(x) <= _FEW_ROWS and y.stride(1) == 1 else None
        if kernels is not None and (kernels.outdo_torch or len(b) <= _LOW_RANK):
            kernels.add_low_rank(y, x, a, b)
        else:
            y.addmm_(torch.mm(x, a), b)

    @staticmethod
    def add_outer(totals: Sequence[Tensor], left: Tensor, right: Tensor, scale: float = 1.0) -> None:
        """Adds scale * left^T right to the only total."""
        (total,) = totals
        left = left if left.shape[1] == len(total) else left[:, : len(total)]
        if left.dtype == torch.float32:
            total.addmm_(left.t(), right, alpha=scale)
        elif left.is_cuda:
            total.add_(torch.mm(left.t(), right, out_dtype=torch.float32), alpha=scale)
        else:
            total.addmm_(left.t().float(), right.float(), alpha=scale)


class _ManyAdapters:
    """The rows of more than one adapter, whose matrices are copied to one tensor [n, p, q]."""

    def __init__(self, lengths: Sequence[int], scales: Sequence[float], device: torch.device) -> None:
        self._lengths = torch.tensor(lengths, device=device)
        self.scale: float | Tensor = scales[0]
        if any(scale != scales[0] for scale in scales):
            self.scale = torch.tensor(scales, device=device).repeat_interleave(self._lengths)[:, None]


class EqualLengths(_ManyAdapters):
    """Adapters with equally many rows, which form a batch without copying."""

    def __init__(self, lengths: Sequence[int], scales: Sequence[float], device: torch.device) -> None:
        super().__init__(lengths, scales, device)
        self._shape = (len(lengths), lengths[0])

    def times(self, x: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
        count, length = self._shape
        batch = x.view(count, length, -1)
        if out is not None and out.is_contiguous():
            out.view(count, length, -1).baddbmm_(batch, matrices, beta=0)
            return out
        # With strided columns as the output, bmm would loop over the adapters.
        product = torch.bmm(batch, matrices).view(count * length, -1)
        return product if out is None else out.copy_(product)

    def add_product(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        reduced = torch.bmm(x.view(*self._shape, -1), a)
        if y.is_contiguous():
            y.view(*self._shape, -1).baddbmm_(reduced, b)
        else:
            y.add_(torch.bmm(reduced, b).view(y.shape))

    def add_outer(self, totals: Sequence[Tensor], left: Tensor, right: Tensor) -> None:
        left, right = _summable(left, right)
        _add(totals, _batched_outer(left.view(*self._shape, -1), right.view(*self._shape, -1)))


class PaddedLengths(_ManyAdapters):
    """Adapters with few rows, copied to a batch padded to the longest; the padding repeats an adapter's last row."""

    def __init__(self, lengths: Sequence[int], scales: Sequence[float], device: torch.device) -> None:
        super().__init__(lengths, scales, device)
        longest, stops = max(lengths), list(accumulate(lengths))
        self._shape = (len(lengths), longest)
        start_of = torch.tensor([stop - length for stop, length in zip(stops, lengths, strict=True)], device=device)
        place = torch.arange(longest, device=device)
        self._padding = place >= self._lengths[:, None]
        self._sources = (start_of[:, None] + place.minimum(self._lengths[:, None] - 1)).flatten()
        self._back = (~self._padding).flatten().nonzero().squeeze(1)

    def times(self, x: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
        product = torch.bmm(self._batch(x), matrices).flatten(0, 1).index_select(0, self._back)
        return product if out is None else out.copy_(product)

    def add_product(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        product = torch.bmm(torch.bmm(self._batch(x), a), b)
        y.add_(product.flatten(0, 1).index_select(0, self._back))

    def add_outer(self, totals: Sequence[Tensor], left: Tensor, right: Tensor) -> None:
        left, right = _summable(left, right)
        once = self._batch(left).masked_fill_(self._padding[:, :, None], 0)
        _add(totals, _batched_outer(once, self._batch(right)))

    def _batch(self, x: Tensor) -> Tensor:
        return x.index_select(0, self._sources).view(*self._shape, -1)


class RaggedLengths(_ManyAdapters):
    """Adapters with differing numbers of rows, multiplied by torch's grouped product.

    It requires strides that are multiples of 16 bytes.
    """

    def __init__(self, lengths: Sequence[int], scales: Sequence[float], device: torch.device) -> None:
        super().__init__(lengths, scales, device)
        self._split = list(lengths)
        self._stops = self._lengths.cumsum(0).to(torch.int32)

    def times(self, x: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
        with _one_thread(x.device):
            product = torch.ops.aten._grouped_mm(x, matrices, self._stops)
        return product if out is None else out.copy_(product)

    def add_product(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        y.add_(self.times(self.times(x, a), b))

    def add_outer(self, totals: Sequence[Tensor], left: Tensor, right: Tensor) -> None:
        """Adds the outer products; on CUDA each is rounded to its factors' dtype at the end."""
        left, right = _summable(left, right)
        if left.is_cuda:
            _add(totals, torch.ops.aten._grouped_mm(left.t(), right, self._stops).float())
            return
        # Summing onto the totals saves more than a single call for all adapters would.
        with _one_thread(left.device):
            for total, own_left, own_right in zip(
                totals, left.split(self._split), right.split(self._split), strict=True
            ):
                total.addmm_(own_left.t()[: len(total)], own_right)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Limits torch to one thread on the CPU while inside.

    The grouped product is a loop over short products there, each done before a second thread would have woken up.
    """
    num_threads = torch.get_num_threads()
    if device.type != "cpu" or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _summable(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both in float32 on the CPU, where products of 16-bit numbers cannot be summed in float32."""
    return (left, right) if left.is_cuda else (left.float(), right.float())


def _batched_outer(left: Tensor, right: Tensor) -> Tensor:
    """Returns left^T right of each, float32 [n, p, q], for left [n, rows, p] and right [n, rows, q]."""
    if left.dtype == torch.float32:
        return torch.bmm(left.transpose(1, 2), right)
    return torch.bmm(left.transpose(1, 2), right, out_dtype=torch.float32)


def _add(totals: Sequence[Tensor], products: Tensor) -> None:
    parts = [
        product if len(product) == len(total) else product[: len(total)]
        for product, total in zip(products.unbind(), totals, strict=True)
    ]
    torch.ops.aten._foreach_add_.List(list(totals), parts)

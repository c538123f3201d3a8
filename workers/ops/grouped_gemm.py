"""Grouped matrix products: rows sorted into groups, some of them empty, each multiplied by its group's matrix."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from .kernels import kernels_for

# The kernel is faster with at most this many rows per group, or where one side of the matrices is at most so wide.
_FEW_ROWS, _NARROW = 8, 32


class GroupedRows:
    """Rows sorted by group; rows after the last group belong to none. counts: int64 [groups]."""

    def __init__(self, counts: Tensor) -> None:
        self._counts = counts

    def matmul(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Multiplies each row of x [rows, p] by its group's matrix of [groups, p, q]. Rows of no group become zeros."""
        if _is_native(x):
            y = torch._grouped_mm(x, matrices, offs=self._stops)  # pyright: ignore[reportPrivateImportUsage]
            return y.masked_fill_(torch.arange(len(x), device=x.device)[:, None] >= self._stops[-1], 0)
        y = x.new_empty(len(x), matrices.shape[2])
        if not self._runs_kernel(y, x, matrices, adds=False):
            for number, rows in self._spans:
                torch.mm(x[rows], matrices[number], out=y[rows])
            y[self._bounds[-1] :] = 0
        return y

    def add_matmul(self, y: Tensor, x: Tensor, matrices: Tensor) -> None:
        """Adds the result of `matmul` to y [rows, q]."""
        if _is_native(x):
            y.add_(self.matmul(x, matrices))
            return
        if self._runs_kernel(y, x, matrices, adds=True):
            return
        for number, rows in self._spans:
            y[rows].addmm_(x[rows], matrices[number])

    def add_vectors(self, y: Tensor, vectors: Tensor) -> None:
        """Adds to each row of y [rows, q] its group's vector of [groups, q]."""
        if _is_native(y):
            y.add_(torch.cat([vectors, vectors.new_zeros(1, vectors.shape[1])])[self._group_of_rows(len(y))])
            return
        for number, rows in self._spans:
            y[rows].add_(vectors[number])

    def add_sums(self, totals: Tensor, x: Tensor) -> None:
        """Adds to totals [groups, q] the sums over each group's rows of x [rows, q], in the dtype of the totals."""
        for number, rows in self._spans:
            totals[number].add_(x[rows].sum(0, dtype=totals.dtype))

    def add_outer(self, totals: Sequence[Tensor], left: Tensor, right: Tensor) -> None:
        """Adds left^T right over each group's rows, summed in float32.

        The product of group g goes to totals[g % n][g // n], for n totals.

        Args:
            totals: float32 [groups / n, rank, q]; columns of `left` beyond the rank are left out.
            left: [rows, p].
            right: [rows, q].
        """
        if _is_native(left):
            # Rounded to the factors' dtype at the end.
            products = torch._grouped_mm(left.t(), right, offs=self._stops)  # pyright: ignore[reportPrivateImportUsage]
            products.masked_fill_((self._counts == 0)[:, None, None], 0)
            for number, total in enumerate(totals):
                total.add_(products[number :: len(totals), : total.shape[1]])
            return
        for number, rows in self._spans:
            total = totals[number % len(totals)][number // len(totals)]
            total.addmm_(left[rows, : len(total)].t().float(), right[rows].float())

    def _runs_kernel(self, y: Tensor, x: Tensor, matrices: Tensor, adds: bool) -> bool:
        """Multiplies by a kernel, and returns True, if torch's products of the groups one by one would take longer."""
        num_groups, inner, columns = matrices.shape
        is_narrow = min(inner, columns) <= _NARROW and matrices.stride(2) == 1
        kernels = kernels_for(y, x, matrices) if is_narrow or len(x) <= _FEW_ROWS * num_groups else None
        if kernels is None or y.stride(1) != 1 or 1 not in matrices.stride()[1:]:
            return False
        kernels.grouped_matmul(y, x, matrices, self._bounds, adds)
        return True

    def _group_of_rows(self, num_rows: int) -> Tensor:
        """Returns the group of each row, int64 [rows]; their number for rows of none."""
        rows = torch.arange(num_rows, dtype=self._stops.dtype, device=self._stops.device)
        return torch.searchsorted(self._stops, rows, right=True)

    @cached_property
    def _stops(self) -> Tensor:
        return self._counts.cumsum(0).int()

    @cached_property
    def _bounds(self) -> Tensor:
        """The row at which each group begins, and the end of the last: int64 [groups + 1]."""
        return pad(self._counts.cumsum(0), (1, 0))

    @cached_property
    def _spans(self) -> list[tuple[int, slice]]:
        spans, start = [], 0
        for number, count in enumerate(self._counts.tolist()):
            if count:
                spans.append((number, slice(start, start + count)))
                start += count
        return spans


def _is_native(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16

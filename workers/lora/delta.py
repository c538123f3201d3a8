"""The LoRA terms of a packed row at one site, scale * (x A^T) B^T, and their gradients."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..ops.frozen.quantized import FrozenWeight
from .segment import SegmentGroup
from .segmented_matmul import SegmentedMatmul
from .stacked_factors import LinearSite, StackedFactors


class LoraDelta:
    """The terms of all rows at a site; zero for rows of no group."""

    def __init__(
        self, site: LinearSite, groups: Sequence[tuple[SegmentGroup, SegmentedMatmul, StackedFactors]], num_rows: int
    ) -> None:
        """Takes at least one group, in row order."""
        self.num_rows = num_rows
        self._groups = [(group.rows, _GroupTerms(site, group, rows, factors)) for group, rows, factors in groups]
        self._num_columns = site.num_columns
        self._gaps = list(_gaps([rows for rows, _ in self._groups], num_rows))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the terms [rows, out] of x [rows, in], and what `backward` needs."""
        if self._is_one:
            ((_, terms),) = self._groups
            y, reduced = terms.forward(x, None)
            return y, [reduced]
        y = self._empty(x, self._num_columns)
        return y, [terms.forward(x[rows], y[rows])[1] for rows, terms in self._groups]

    def merged(self, weight: FrozenWeight) -> Tensor | None:
        """Returns the weight [out, in] with the terms' matrices added, if one product with it takes less time than two.

        That needs one adapter with all rows, and more of them than the weight has on either side. It is a copy, of
        float32: a rounded sum would lose what is small in the terms.
        """
        if not self._is_one or not isinstance(weight, Tensor) or self.num_rows < max(weight.shape):
            return None
        return self._groups[0][1].merged(weight) if weight.is_cpu and weight.dtype == torch.float32 else None

    def reduce(self, x: Tensor) -> list[Tensor]:
        """Returns what `backward` needs, for x [rows, in], if one adapter has all rows."""
        ((_, terms),) = self._groups
        return [terms.reduce(x)]

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Adds the terms of x [rows, in] to y [rows, out]: like `forward` in fewer calls, but without backward."""
        if self._is_one:
            self._groups[0][1].add_to(y, x)
            return
        for rows, terms in self._groups:
            terms.add_to(y[rows], x[rows])

    def backward(self, grad: Tensor, x: Tensor, all_reduced: list[Tensor], of_x: bool) -> Tensor | None:
        """Adds to the gradients of all A and B. `grad` [rows, out] is the gradient of the terms.

        Returns:
            the terms' part of the gradient of x [rows, in] if `of_x`, else None.
        """
        if self._is_one:
            ((_, terms),) = self._groups
            grad_reduced = terms.backward(grad, x, all_reduced[0])
            return terms.grad_x(grad_reduced, None) if of_x else None
        grad_x = self._empty(grad, x.shape[1]) if of_x else None
        for (rows, terms), reduced in zip(self._groups, all_reduced, strict=True):
            grad_reduced = terms.backward(grad[rows], x[rows], reduced)
            if grad_x is not None:
                terms.grad_x(grad_reduced, grad_x[rows])
        return grad_x

    @property
    def _is_one(self) -> bool:
        """True if one group has all rows."""
        return len(self._groups) == 1 and not self._gaps

    def _empty(self, like: Tensor, num_columns: int) -> Tensor:
        """Returns an output [rows, num_columns] for the groups, already zero in the rows of none."""
        empty = like.new_empty(len(like), num_columns)
        for gap in self._gaps:
            empty[gap] = 0
        return empty


class _GroupTerms:
    def __init__(self, site: LinearSite, group: SegmentGroup, rows: SegmentedMatmul, factors: StackedFactors) -> None:
        self._site, self._rows, self._adapters, self._factors = site, rows, group.adapters, factors

    def add_to(self, y: Tensor, x: Tensor) -> None:
        folded = self._factors.folded
        self._rows.add_product(y, x, folded.a, folded.b)

    def merged(self, weight: Tensor) -> Tensor | None:
        """See LoraDelta.merged."""
        if len(self._adapters) > 1:
            return None
        sum_of_both, scale = weight.clone(memory_format=torch.contiguous_format), self._adapters[0].scale
        for ranks, columns, b in self._parts():
            sum_of_both[columns].addmm_(b.t(), self._factors.a[ranks], alpha=scale)
        return sum_of_both

    def reduce(self, x: Tensor) -> Tensor:
        """Returns the scaled x A^T [rows, rank] of x [rows, in], which `backward` needs."""
        return self._rows.scale(self._rows.times(x, self._factors.a.mT))

    def forward(self, x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the terms [rows, out] of x [rows, in], in `out` if given, and what `backward` needs."""
        reduced = self.reduce(x)
        if len(self._factors.bs) == 1:
            return self._rows.times(reduced, self._factors.bs[0], out), reduced
        out = x.new_empty(len(x), self._site.num_columns) if out is None else out
        if self._site.num_frozen:
            out[:, -self._site.num_frozen :] = 0
        for ranks, columns, b in self._parts():
            self._rows.times(reduced[:, ranks], b, out[:, columns])
        return out, reduced

    def backward(self, grad: Tensor, x: Tensor, reduced: Tensor) -> Tensor:
        """Adds to the gradients of A and B.

        Args:
            grad: gradient of the site's output, [rows, out].
        Returns:
            the gradient of the reduced x, [rows, rank], for `grad_x`.
        """
        grad_reduced = self._rows.scale(self._grad_reduced(grad))
        gradients = [adapter.gradients.of_lane().views for adapter in self._adapters]
        for name, (ranks, columns, _) in zip(self._site.names, self._parts(), strict=True):
            of_a, of_b = zip(*(matrices[name] for matrices in gradients), strict=True)
            self._rows.add_outer(of_a, grad_reduced[:, ranks], x)
            self._rows.add_outer(of_b, reduced[:, ranks], grad[:, columns])
        return grad_reduced

    def grad_x(self, grad_reduced: Tensor, out: Tensor | None) -> Tensor:
        """Returns the terms' part of the gradient of x [rows, in], in `out` if given."""
        return self._rows.times(grad_reduced, self._factors.a, out)

    def _grad_reduced(self, grad: Tensor) -> Tensor:
        if len(self._factors.bs) == 1:
            return self._rows.times(grad, self._factors.bs[0].mT)
        grad_reduced = grad.new_empty(len(grad), self._factors.ranks[-1].stop)
        for ranks, columns, b in self._parts():
            self._rows.times(grad[:, columns], b.mT, grad_reduced[:, ranks])
        return grad_reduced

    def _parts(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yields, for each layer, its columns of the reduced x, its columns of the output, and B^T."""
        return zip(self._factors.ranks, self._site.columns, self._factors.bs, strict=True)


def _gaps(covered: Sequence[slice], num_rows: int) -> Iterator[slice]:
    starts, stops = [rows.start for rows in covered], [rows.stop for rows in covered]
    return (slice(a, b) for a, b in zip([0, *stops], [*starts, num_rows], strict=True) if a < b)

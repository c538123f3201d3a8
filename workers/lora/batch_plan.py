"""The adapters of one packed row: the matrices that its adapted layers multiply with, and the terms that they add.

A layer's terms are scale * (x A^T) B^T, on the rows of an adapter. With gradients they are summed from A and B (see
GroupTerms), without from copies of both for fewer products (see `fold`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .adapter import Adapter
from .lora_experts import ExpertPlan
from .segment import RowGroup, Segment, row_groups
from .segmented_matmul import stack


@dataclass(frozen=True, eq=False)
class LinearSite:
    """Linear layers of one input, by name, whose outputs are concatenated."""

    names: tuple[str, ...]
    out_features: tuple[int, ...]
    num_frozen: int = 0
    """The columns after them that no adapter adapts."""

    @cached_property
    def num_columns(self) -> int:
        return sum(self.out_features) + self.num_frozen

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """The columns of each layer's output."""
        stops = accumulate(self.out_features)
        return tuple(slice(stop - size, stop) for stop, size in zip(stops, self.out_features, strict=True))


class BatchPlan:
    """The segments of one packed row, grouped for products.

    It holds copies of the matrices, so a change of weights makes it stale.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        aligned: bool,
        previous: "BatchPlan | None" = None,
        pass_adapters: Sequence[Adapter] = (),
    ) -> None:
        """Groups the segments.

        Args:
            aligned: whether all features are multiples of 16 bytes.
            previous: a plan of other segments, whose copies are reused where the adapters are the same.
            pass_adapters: all adapters of a pass, in the same order on all ranks; needed if tokens of other ranks are
                routed to this rank's experts.
        """
        self._segments = tuple(segments)
        self._num_rows = segments[-1].stop if segments else 0
        self._groups = row_groups(segments, device, aligned)
        adapters = [adapter for group in self._groups for adapter in group.adapters]
        self._versions = [(adapter, _version(adapter)) for adapter in adapters]
        self._terms: dict[LinearSite, GroupTerms | SeveralTerms | None] = {}
        self._folded: dict[LinearSite, list[tuple[RowGroup, tuple[Tensor, Tensor]]]] = {}
        self._copies: dict[tuple[LinearSite, tuple[Adapter, ...]], tuple[Tensor, Tensor]] = {}
        previous = previous if previous is not None and previous.is_current else None
        self.experts: ExpertPlan | None = None
        """The part of the plan for sparse layers; None if no adapter adapts experts."""
        if adapting := [adapter for adapter in pass_adapters or adapters if adapter.adapts_experts]:
            sharing = [group for group in self._groups if group.adapters[0].shares_factors]
            of_experts = None if previous is None else previous.experts
            self.experts = ExpertPlan(self._segments, sharing, adapting, device, of_experts)
        if previous is not None:
            wanted = {group.adapters for group in self._groups}
            self._copies = {key: factors for key, factors in previous._copies.items() if key[1] in wanted}

    @property
    def is_current(self) -> bool:
        """True if no weight has changed or moved since the plan was built."""
        return all(_version(adapter) == version for adapter, version in self._versions)

    def is_valid_for(self, segments: tuple[Segment, ...]) -> bool:
        """True if the plan is of these segments and still current."""
        return self._segments == segments and self.is_current

    def terms(self, site: LinearSite, num_rows: int) -> "GroupTerms | SeveralTerms | None":
        """Returns the terms of so many rows at a site, or None if no adapter adapts it. The first call builds them."""
        if site not in self._terms:
            terms = [GroupTerms(site, group) for group in self._groups if site.names[0] in group.adapters[0].pairs]
            is_one = len(terms) == 1 and terms[0].group.is_whole
            self._terms[site] = terms[0] if is_one else SeveralTerms(site, terms, num_rows) if terms else None
        found = self._terms[site]
        assert found is None or num_rows == self._num_rows, self._misfit(site, num_rows)
        return found

    def add_terms(self, site: LinearSite, y: Tensor, x: Tensor) -> None:
        """Adds the terms of x [rows, in] to y [rows, out], in fewer calls than `terms`, but without backward."""
        if (folded := self._folded.get(site)) is None:
            adapted = [group for group in self._groups if site.names[0] in group.adapters[0].pairs]
            folded = self._folded[site] = [(group, self._copy_of(site, group)) for group in adapted]
        assert not folded or len(x) == self._num_rows, self._misfit(site, len(x))
        for group, factors in folded:
            own_y, own_x = (y, x) if group.is_whole else (y[group.rows], x[group.rows])
            group.matmul.add_product(own_y, own_x, *factors)

    def _misfit(self, site: LinearSite, num_rows: int) -> str:
        return f"{site.names[0]}: {num_rows} tokens, but the segments end at {self._num_rows}"

    def _copy_of(self, site: LinearSite, group: RowGroup) -> tuple[Tensor, Tensor]:
        key = site, group.adapters
        if key not in self._copies:
            self._copies[key] = fold(site, group)
        return self._copies[key]


class LayerFactors(NamedTuple):
    """A layer's part of a site's factors."""

    name: str
    ranks: slice
    """The rows of A that are its own."""
    columns: slice
    """The columns of the site's output that it adapts."""
    b: Tensor
    """B^T: [rank, out], or [n, rank, out] of n adapters."""


class GroupTerms:
    """The terms of a group's rows at a site, and their gradients: x is shrunk by A, and expanded by B."""

    def __init__(self, site: LinearSite, group: RowGroup) -> None:
        self.group, self._site = group, site
        self._a, self._layers = _factors(site, group.weights)
        longest = max(self._a.shape[-1], site.num_columns)
        self.is_long = (
            len(group.adapters) == 1
            and group.rows.stop - group.rows.start >= longest
            and self._a.is_cpu
            and self._a.dtype == torch.float32
        )
        """True if a product with the sum of the weight and of the terms' matrices takes less time than two products.

        That needs one adapter, and more rows than the weight has on either side. The sum has float32: a rounded one
        would lose what is small in the terms.
        """

    def shrink(self, x: Tensor) -> Tensor:
        """Returns the scaled x A^T [rows, R] of x [rows, in]."""
        return self.group.matmul.times(x, self._a.mT).mul_(self.group.matmul.scale)

    def expand(self, shrunk: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the terms [rows, out], in `out` if given, from what `shrink` returned."""
        times = self.group.matmul.times
        if len(self._layers) == 1:
            return times(shrunk, self._layers[0].b, out)
        out = shrunk.new_empty(len(shrunk), self._site.num_columns) if out is None else out
        if self._site.num_frozen:
            out[:, -self._site.num_frozen :] = 0
        for layer in self._layers:
            times(shrunk[:, layer.ranks], layer.b, out[:, layer.columns])
        return out

    def backward(
        self, grad: Tensor, x: Tensor, shrunk: Tensor, wants_x: bool, out: Tensor | None = None
    ) -> Tensor | None:
        """Adds to the gradients of all A and B. `grad` [rows, out] is the gradient of the terms.

        Returns:
            the terms' part of the gradient of x [rows, in] if `wants_x`, in `out` if given.
        """
        matmul, layers = self.group.matmul, self._layers
        if len(layers) == 1:
            grad_shrunk = matmul.times(grad, layers[0].b.mT)
        else:
            grad_shrunk = grad.new_empty(shrunk.shape)
            for layer in layers:
                matmul.times(grad[:, layer.columns], layer.b.mT, grad_shrunk[:, layer.ranks])
        grad_shrunk.mul_(matmul.scale)
        gradients = [adapter.gradients.of_lane().views for adapter in self.group.adapters]
        for layer in layers:
            grad_a, grad_b = zip(*(matrices[layer.name] for matrices in gradients), strict=True)
            matmul.add_outer(grad_a, grad_shrunk[:, layer.ranks], x)
            matmul.add_outer(grad_b, shrunk[:, layer.ranks], grad[:, layer.columns])
        return matmul.times(grad_shrunk, self._a, out) if wants_x else None

    def added_to(self, weight: Tensor) -> Tensor:
        """Returns a copy of the weight [out, in] with the terms' matrices added; see `is_long`."""
        total = weight.clone(memory_format=torch.contiguous_format)
        for layer in self._layers:
            total[layer.columns].addmm_(layer.b.t(), self._a[layer.ranks], alpha=self.group.adapters[0].scale)
        return total


class SeveralTerms:
    """The terms of several groups, or of one without all rows; zero for rows of no group."""

    def __init__(self, site: LinearSite, terms: Sequence[GroupTerms], num_rows: int) -> None:
        """Takes at least one group's terms, in row order."""
        self._site, self._num_rows = site, num_rows
        self._terms = [(each.group.rows, each) for each in terms]
        bounds = [0, *(bound for rows, _ in self._terms for bound in (rows.start, rows.stop)), num_rows]
        self._gaps = [slice(start, stop) for start, stop in list(pairwise(bounds))[::2] if start < stop]

    def shrink(self, x: Tensor) -> list[Tensor]:
        """Shrinks the rows of each group."""
        return [terms.shrink(x[rows]) for rows, terms in self._terms]

    def expand(self, shrunk: Sequence[Tensor]) -> Tensor:
        """Returns the terms [rows, out] from what `shrink` returned."""
        y = self._empty(shrunk[0], self._site.num_columns)
        for (rows, terms), own in zip(self._terms, shrunk, strict=True):
            terms.expand(own, y[rows])
        return y

    def backward(self, grad: Tensor, x: Tensor, shrunk: Sequence[Tensor], wants_x: bool) -> Tensor | None:
        """See GroupTerms.backward."""
        grad_x = self._empty(grad, x.shape[1]) if wants_x else None
        for (rows, terms), own in zip(self._terms, shrunk, strict=True):
            terms.backward(grad[rows], x[rows], own, wants_x, None if grad_x is None else grad_x[rows])
        return grad_x

    def _empty(self, like: Tensor, num_columns: int) -> Tensor:
        """Returns an output [rows, num_columns] for the groups, already zero in the rows of none."""
        empty = like.new_empty(self._num_rows, num_columns)
        for gap in self._gaps:
            empty[gap] = 0
        return empty


def fold(site: LinearSite, group: RowGroup) -> tuple[Tensor, Tensor]:
    """Returns a and b, for products without gradients: x a b are the terms of all layers of a site, scale included.

    They are copies, so they may be kept while the adapters are offloaded: [in, R] and [R, out], or [n, in, R] and
    [n, R, out] for n adapters, where R is the sum of the layers' ranks. b is zero but for one block per layer.
    """
    stacked, layers = _factors(site, [adapter.vectors.weight_views() for adapter in group.adapters])
    a = stacked.mT.clone(memory_format=torch.contiguous_format)
    b = a.new_zeros(*a.shape[:-2], a.shape[-1], site.num_columns)
    for layer in layers:
        b[..., layer.ranks, layer.columns] = layer.b
    if b.dim() == 2:
        return a, b.mul_(group.adapters[0].scale)
    # In float32 even if the factors are not, as in products with gradients.
    scales = torch.tensor([adapter.scale for adapter in group.adapters], device=b.device)
    return a, b.mul_(scales.view(-1, 1, 1))


def _factors(
    site: LinearSite, weights: Sequence[Mapping[str, tuple[Tensor, Tensor]]]
) -> tuple[Tensor, list[LayerFactors]]:
    """Stacks the adapters' weights at a site. Returns A of all layers, [R, in] or [n, R, in], and the layers."""
    of_a, layers, first = [], [], 0
    for name, columns in zip(site.names, site.columns, strict=True):
        of_a.append(stack([views[name][0] for views in weights]))
        b = stack([views[name][1] for views in weights])
        layers.append(LayerFactors(name, slice(first, first + b.shape[-2]), columns, b))
        first += b.shape[-2]
    return of_a[0] if len(of_a) == 1 else torch.cat(of_a, dim=-2), layers


def _version(adapter: Adapter) -> tuple[int, int | None]:
    return adapter.vectors.num_changes, adapter.vectors.weights_address

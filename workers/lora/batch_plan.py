"""The adapters of one packed row: the matrices that its adapted layers multiply with, and the terms that they add.

A layer's terms are scale * (x A^T) B^T, on the rows of an adapter. With gradients they are summed from A and B (see
SiteTerms), without from copies of both for fewer products (see `fold`).
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
        self._versions = [(adapter, adapter.vectors.version) for adapter in adapters]
        self._terms: dict[LinearSite, SiteTerms | None] = {}
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
        return all(adapter.vectors.version == version for adapter, version in self._versions)

    def is_valid_for(self, segments: tuple[Segment, ...]) -> bool:
        """True if the plan is of these segments and still current."""
        return self._segments == segments and self.is_current

    def terms(self, site: LinearSite, num_rows: int) -> "SiteTerms | None":
        """Returns the terms of so many rows at a site, or None if no adapter adapts it. The first call builds them."""
        if site not in self._terms:
            groups = [group for group in self._groups if site.names[0] in group.adapters[0].pairs]
            terms = [GroupTerms(group, *_factors(site, group.weights)) for group in groups]
            self._terms[site] = _site_terms(site, terms, num_rows) if terms else None
        found = self._terms[site]
        assert found is None or num_rows == self._num_rows, self._misfit(site, num_rows)
        return found

    def add_terms(self, site: LinearSite, y: Tensor, x: Tensor) -> None:
        """Adds the terms of x [rows, in] to y [rows, out], in fewer calls than `terms`, but without backward."""
        if (folded := self._folded.get(site)) is None:
            adapted = [group for group in self._groups if site.names[0] in group.adapters[0].pairs]
            for group in adapted:
                if (site, group.adapters) not in self._copies:
                    self._copies[site, group.adapters] = fold(site, group)
            folded = self._folded[site] = [(group, self._copies[site, group.adapters]) for group in adapted]
        assert not folded or len(x) == self._num_rows, self._misfit(site, len(x))
        for group, factors in folded:
            own_y, own_x = (y, x) if group.is_whole else (y[group.rows], x[group.rows])
            group.matmul.add_product(own_y, own_x, *factors)

    def _misfit(self, site: LinearSite, num_rows: int) -> str:
        return f"{site.names[0]}: {num_rows} tokens, but the segments end at {self._num_rows}"


class LayerFactors(NamedTuple):
    """A layer's part of a site's factors."""

    name: str
    ranks: slice
    """The rows of A that are its own."""
    columns: slice
    """The columns of the site's output that it adapts."""
    b: Tensor
    """B^T: [rank, out], or [n, rank, out] of n adapters."""


class GroupTerms(NamedTuple):
    """The terms of a group's rows at a site: x is shrunk by A, and expanded by the B of each layer."""

    group: RowGroup
    a: Tensor
    """A of all layers below each other: [R, in], or [n, R, in] of n adapters."""
    layers: Sequence[LayerFactors]


class SiteTerms(NamedTuple):
    """The terms of all groups at a site."""

    groups: Sequence[GroupTerms]
    gaps: Sequence[slice]
    """The rows of no group, whose terms are zero."""
    num_columns: int
    num_frozen: int
    """The last columns, which no adapter adapts."""
    is_long: bool
    """True if a product with the sum of the weight and of the terms' matrices takes less time than two products.

    That needs one adapter, and more rows than the weight has on either side. The sum has float32: a rounded one would
    lose what is small in the terms.
    """

    def new(self, like: Tensor, num_columns: int) -> Tensor:
        """Returns [rows, num_columns] for the groups, already zero in the rows of none."""
        empty = like.new_empty(len(like), num_columns)
        for gap in self.gaps:
            empty[gap] = 0
        return empty

    def expand(self, x: Tensor, shrunk: Sequence[Tensor]) -> Tensor:
        """Returns the terms [rows, out] from the products of x with A by group."""
        y = self.new(x, self.num_columns)
        if self.num_frozen:
            y[:, -self.num_frozen :] = 0
        for (group, _, layers), own in zip(self.groups, shrunk, strict=True):
            for layer in layers:
                group.matmul.times(own[:, layer.ranks], layer.b, out=y[group.rows, layer.columns])
        return y

    def added_to(self, weight: Tensor) -> Tensor:
        """Returns a copy of the weight [out, in] with the terms' matrices added; see `is_long`."""
        total, (terms,) = weight.clone(memory_format=torch.contiguous_format), self.groups
        for layer in terms.layers:
            total[layer.columns].addmm_(layer.b.t(), terms.a[layer.ranks], alpha=terms.group.adapters[0].scale)
        return total


def _site_terms(site: LinearSite, groups: Sequence[GroupTerms], num_rows: int) -> SiteTerms:
    a, gaps, is_long = groups[0].a, [], False
    if groups[0].group.is_whole:
        longest = max(a.shape[-1], site.num_columns)
        is_long = num_rows >= longest and a.dim() == 2 and a.is_cpu and a.dtype == torch.float32
    else:
        bounds = [0, *(bound for each in groups for bound in (each.group.rows.start, each.group.rows.stop)), num_rows]
        gaps = [slice(start, stop) for start, stop in list(pairwise(bounds))[::2] if start < stop]
    return SiteTerms(groups, gaps, site.num_columns, site.num_frozen, is_long)


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

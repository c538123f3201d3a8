"""Adds adapters to the experts of sparse layers: each expert's gate, if any, up and down have a pair of matrices each.

Pairs of token and expert are sorted by expert and adapter, so one grouped product (see ../ops/grouped_gemm.py) covers
the matrices of all experts of several adapters. Matrices that the experts share are multiplied by token, see
shared_factors.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops.grouped_gemm import GroupedRows
from .adapter import Adapter
from .segment import RowGroup, Segment
from .shared_factors import SharedTerms, shared_factors, width_of
from .target import DOWN, feature_kinds

# On CUDA, ranks are padded to a multiple of this, so that rows of 16-bit numbers are multiples of 16 bytes.
_NATIVE_RANK = 8


@dataclass(frozen=True)
class AdapterBundle:
    """Adapters of equal rank and scale, which run in the same products.

    kinds: the places of these adapters among all adapters of the plan.
    """

    adapters: tuple[Adapter, ...]
    kinds: slice

    @property
    def scale(self) -> float:
        return self.adapters[0].scale

    @property
    def shares_factors(self) -> bool:
        """True if the experts of each adapter share factors."""
        return self.adapters[0].shares_factors


class ExpertPlan:
    """Assigns each token of a packed row the adapter that its experts use, once for all sparse layers.

    adapters: those that adapt experts. The kind of a token is its adapter's place among them, or their number if it has
    none. width: see shared_factors.width_of.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        groups: Sequence[RowGroup],
        adapters: Sequence[Adapter],
        device: torch.device,
        before: "ExpertPlan | None" = None,
    ) -> None:
        """Sorts the adapters into bundles.

        Args:
            groups: the segments' tokens of adapters whose experts share factors.
            adapters: of the tokens that reach this rank's experts from any rank; all ranks list them in the same order.
            before: an earlier plan, whose copies are reused where the adapters are the same.
        """
        self.adapters = sorted(dict.fromkeys(adapters), key=_bundle_key)
        self.bundles = list(_bundles(self.adapters))
        kinds = {adapter: kind for kind, adapter in enumerate(self.adapters)}
        self._adapted = [(kinds[each.adapter], each) for each in segments if each.adapter in kinds]
        self._num_tokens = segments[-1].stop if segments else None
        self._device = device
        self._slots: Tensor | None = None
        self._copies: dict[tuple[str, int, tuple[Adapter, ...]], Tensor] = {}
        self._groups, self.width = groups, width_of(self.adapters)
        self._shared: dict[tuple[str, tuple[Adapter, ...]], tuple[Tensor, Tensor]] = {}
        if before is not None:
            wanted = {bundle.adapters for bundle in self.bundles}
            self._copies = {key: copies for key, copies in before._copies.items() if key[2] in wanted}
            if before.width == self.width:
                sharing = {group.adapters for group in groups}
                self._shared = {key: factors for key, factors in before._shared.items() if key[1] in sharing}

    @property
    def has_unadapted(self) -> bool:
        """True if some of this rank's tokens have no adapter at their experts."""
        return sum(segment.length for _, segment in self._adapted) != self._num_tokens

    def kinds(self, num_tokens: int) -> Tensor:
        """Returns the kind of each token: int64 [num_tokens]."""
        assert self._num_tokens in (None, num_tokens), (
            f"{num_tokens} tokens, but the segments end at {self._num_tokens}"
        )
        if self._slots is None:
            slots = torch.full((num_tokens,), len(self.adapters))
            for kind, segment in self._adapted:
                slots[segment.start : segment.stop] = kind
            self._slots = slots.to(self._device)
        return self._slots

    def terms(self, layer: str, counts: Tensor, num_rows: int, has_bare: bool) -> "ExpertTerms":
        """Returns the terms for one call of the layer whose experts have this name.

        Args:
            counts: rows of each, int64 [experts, kinds].
            num_rows: of these, and of those after them that are of none.
            has_bare: whether some rows may be of the last kind, which has no adapter.
        """
        return ExpertTerms(self, layer, counts, num_rows, has_bare)

    def shared_terms(self, layer: str) -> SharedTerms | None:
        """Returns the products with what experts share, or None if no adapter of the pass shares anything."""
        if not self.width:
            return None
        kinds = feature_kinds(layer, self.adapters[0].pairs)
        for adapters in (group.adapters for group in self._groups):
            if (layer, adapters) not in self._shared:
                self._shared[layer, adapters] = shared_factors(layer, kinds, adapters, self.width)
        parts = [(group, self._shared[layer, group.adapters]) for group in self._groups]
        return SharedTerms(layer, kinds, parts, self.width)

    def own_factors(self, layer: str, num_experts: int) -> Sequence[Tensor] | None:
        """Returns B^T of gate, if there is one, and of up, and A of down, of each expert and adapter: [experts *
        adapters, rank, features] each.

        Returns None unless all tokens have adapters of one bundle, whose experts share the other factors.
        """
        if len(self.bundles) > 1 or self.has_unadapted or not self.width:
            return None
        (bundle,) = self.bundles
        sides = [*((kind, 1) for kind in feature_kinds(layer, bundle.adapters[0].pairs)), (DOWN, 0)]
        return [self.matrices(f"{layer}.{kind}", side, bundle, num_experts, is_kept=True) for kind, side in sides]

    def matrices(self, name: str, side: int, bundle: AdapterBundle, num_experts: int, is_kept: bool) -> Tensor:
        """Returns each expert's A (side=0) [groups, rank, in], or B^T (side=1) [groups, rank, out], of a bundle.

        Args:
            is_kept: whether to keep copies for later calls.
        """
        key = name, side, bundle.adapters
        if key in self._copies:
            return self._copies[key]
        stacked = _stacked([adapter.vectors.weight_views()[name][side] for adapter in bundle.adapters], num_experts)
        # The matrices of a single adapter are used in place, and must not be held: they may be offloaded.
        if is_kept and len(bundle.adapters) > 1:
            self._copies[key] = stacked
        return stacked


class ExpertTerms:
    """The adapters' terms for one call of a sparse layer, forward and backward."""

    def __init__(self, plan: ExpertPlan, layer: str, counts: Tensor, num_rows: int, has_bare: bool) -> None:
        is_kept = not torch.is_grad_enabled()
        is_whole = len(plan.bundles) == 1 and not has_bare
        kind_of_each = None if is_whole else _kind_of_each(counts, num_rows)
        self._width = plan.width
        self._parts = [
            (_BetweenSharedTerms if bundle.shares_factors else _BundleTerms)(
                plan, layer, bundle, counts, kind_of_each, is_kept
            )
            for bundle in plan.bundles
        ]

    @property
    def needs_inputs(self) -> bool:
        """True if `gate_up_backward` needs x."""
        return any(isinstance(part, _BundleTerms) for part in self._parts)

    def add_gate_up(self, y: Tensor, x: Tensor, reduced: Tensor | None) -> None:
        """Adds the terms of x [rows, hidden] to y [rows, features], which has those of gates first, and then of ups.

        Args:
            reduced: the rows' products with the shared factors, see SharedTerms.reduce.
        """
        for part in self._parts:
            part.add_gate_up(y, x, reduced)

    def add_down(self, y: Tensor, x: Tensor) -> Tensor | None:
        """Adds the terms of x [rows, features] to y [rows, hidden].

        Returns:
            those that the shared factors are still to be applied to, [rows, width]; None if experts share none.
        """
        z = x.new_zeros(len(x), self._width) if self._width else None
        for part in self._parts:
            part.add_down(y, x, z)
        return z

    def gate_up_backward(
        self, grad: Tensor, x: Tensor | None, reduced: Tensor | None, grad_x: Tensor | None
    ) -> Tensor | None:
        """Adds to the gradients of A and B, and to `grad_x` unless it is None. `grad` is the gradient of y.

        Returns:
            the gradient of `reduced`.
        """
        grad_reduced = None if reduced is None else torch.zeros_like(reduced)
        for part in self._parts:
            part.gate_up_backward(grad, x, reduced, grad_x, grad_reduced)
        return grad_reduced

    def down_backward(self, grad: Tensor, grad_z: Tensor | None, x: Tensor, grad_x: Tensor) -> None:
        """Adds to the gradients of A and B, and to `grad_x`. The first two are the gradients of y and of the result of
        `add_down`."""
        for part in self._parts:
            part.down_backward(grad, grad_z, x, grad_x)


class _BundleRows:
    """The rows of one bundle's adapters in one call of a layer."""

    def __init__(
        self,
        plan: ExpertPlan,
        layer: str,
        bundle: AdapterBundle,
        counts: Tensor,
        kind_of_each: Tensor | None,
        is_kept: bool,
    ) -> None:
        """Groups the bundle's rows by expert and adapter.

        Args:
            kind_of_each: int64, one per row; None if all rows are the bundle's.
        """
        self._plan, self._layer, self._bundle, self._is_kept = plan, layer, bundle, is_kept
        self._kinds = feature_kinds(layer, bundle.adapters[0].pairs)
        self._num_experts = len(counts)
        self._groups = GroupedRows(counts[:, bundle.kinds].flatten())
        self._rows = None if kind_of_each is None else _within(kind_of_each, bundle.kinds)

    def _own(self, x: Tensor) -> Tensor:
        return x if self._rows is None else x.index_select(0, self._rows)

    def _add_times(self, y: Tensor, x: Tensor, matrices: Tensor) -> None:
        if self._rows is None:
            self._groups.add_matmul(y, x, matrices)
        else:
            y.index_add_(0, self._rows, self._groups.matmul(x, matrices))

    def _matrices(self, kind: str, side: int) -> Tensor:
        name = f"{self._layer}.{kind}"
        return self._plan.matrices(name, side, self._bundle, self._num_experts, self._is_kept)

    def _gradients(self, kind: str, side: int) -> list[Tensor]:
        """Returns the tensors [experts, rank, n] in which each adapter sums the gradients of A or B^T."""
        name = f"{self._layer}.{kind}"
        pairs = [adapter.gradients.of_lane().views[name] for adapter in self._bundle.adapters]
        return [_by_expert(pair[side], self._num_experts) for pair in pairs]


class _BundleTerms(_BundleRows):
    """The terms of adapters that have both matrices for each expert."""

    _gate_up: Sequence[Tensor] = ()
    _down: Sequence[Tensor] = ()

    def add_gate_up(self, y: Tensor, x: Tensor, reduced: Tensor | None) -> None:
        self._gate_up = self._add(self._kinds, y, x)

    def add_down(self, y: Tensor, x: Tensor, z: Tensor | None) -> None:
        self._down = self._add((DOWN,), y, x)

    def gate_up_backward(
        self, grad: Tensor, x: Tensor | None, reduced: Tensor | None, grad_x: Tensor | None, grad_reduced: Tensor | None
    ) -> None:
        assert x is not None
        self._backward(self._kinds, grad, x, self._gate_up, grad_x)

    def down_backward(self, grad: Tensor, grad_z: Tensor | None, x: Tensor, grad_x: Tensor) -> None:
        self._backward((DOWN,), grad, x, self._down, grad_x)

    def _add(self, kinds: Sequence[str], y: Tensor, x: Tensor) -> list[Tensor]:
        """Returns what `_backward` needs, one tensor per kind."""
        own, kept = self._own(x), []
        for kind, columns in zip(kinds, y.chunk(len(kinds), dim=1), strict=True):
            reduced = self._groups.matmul(own, self._matrices(kind, 0).mT).mul_(self._bundle.scale)
            self._add_times(columns, reduced, self._matrices(kind, 1))
            kept.append(reduced)
        return kept

    def _backward(
        self, kinds: Sequence[str], grad: Tensor, x: Tensor, reduced: Sequence[Tensor], grad_x: Tensor | None
    ) -> None:
        own_x, own_grad = self._own(x), self._own(grad)
        parts = own_grad.chunk(len(kinds), dim=1)
        for kind, of_kind, reduced_by_a in zip(kinds, parts, reduced, strict=True):
            grad_reduced = self._groups.matmul(of_kind, self._matrices(kind, 1).mT).mul_(self._bundle.scale)
            self._groups.add_outer(self._gradients(kind, 0), grad_reduced, own_x)
            self._groups.add_outer(self._gradients(kind, 1), reduced_by_a, of_kind)
            if grad_x is not None:
                self._add_times(grad_x, grad_reduced, self._matrices(kind, 0))


class _BetweenSharedTerms(_BundleRows):
    """The products with each expert's own matrices, B of gate and up and A of down, of adapters that share the others.

    SharedTerms multiplies with the others and with the scale.
    """

    def add_gate_up(self, y: Tensor, x: Tensor, reduced: Tensor | None) -> None:
        assert reduced is not None
        for kind, columns, of_kind in zip(
            self._kinds, self._by_kind(y), self._by_kind(self._own(reduced)), strict=True
        ):
            b = self._matrices(kind, 1)
            self._add_times(columns, of_kind[:, : b.shape[1]], b)

    def add_down(self, y: Tensor, x: Tensor, z: Tensor | None) -> None:
        assert z is not None
        a = self._matrices(DOWN, 0)
        self._add_times(z[:, : a.shape[1]], self._own(x), a.mT)

    def gate_up_backward(
        self, grad: Tensor, x: Tensor | None, reduced: Tensor | None, grad_x: Tensor | None, grad_reduced: Tensor | None
    ) -> None:
        assert reduced is not None and grad_reduced is not None
        tensors = (self._own(reduced), self._own(grad), grad_reduced)
        for kind, reduced_by_a, of_kind, total in zip(self._kinds, *map(self._by_kind, tensors), strict=True):
            b = self._matrices(kind, 1)
            self._groups.add_outer(self._gradients(kind, 1), reduced_by_a, of_kind)
            self._add_times(total[:, : b.shape[1]], of_kind, b.mT)

    def _by_kind(self, x: Tensor) -> Sequence[Tensor]:
        return x.chunk(len(self._kinds), dim=1)

    def down_backward(self, grad: Tensor, grad_z: Tensor | None, x: Tensor, grad_x: Tensor) -> None:
        assert grad_z is not None
        own, a = self._own(grad_z), self._matrices(DOWN, 0)
        self._groups.add_outer(self._gradients(DOWN, 0), own, self._own(x))
        self._add_times(grad_x, own[:, : a.shape[1]], a)


def _bundle_key(adapter: Adapter) -> tuple[bool, int, float]:
    """Returns the sort key that the adapters of a bundle have in common."""
    return adapter.shares_factors, adapter.lora.rank, adapter.scale


def _bundles(adapters: Sequence[Adapter]) -> Iterator[AdapterBundle]:
    start = 0
    for _, members in groupby(adapters, key=_bundle_key):
        bundle = tuple(members)
        yield AdapterBundle(bundle, slice(start, start + len(bundle)))
        start += len(bundle)


def _stacked(matrices: Sequence[Tensor], num_experts: int) -> Tensor:
    """Stacks each adapter's [experts * rank, n] to [groups, rank, n]; an expert's adapters follow each other."""
    by_expert = [_by_expert(matrix, num_experts) for matrix in matrices]
    rank = by_expert[0].shape[1]
    if matrices[0].is_cuda and rank % _NATIVE_RANK:
        by_expert = [pad(matrix, (0, 0, 0, -rank % _NATIVE_RANK)) for matrix in by_expert]
    return by_expert[0] if len(by_expert) == 1 else torch.stack(by_expert, dim=1).flatten(0, 1)


def _by_expert(matrix: Tensor, num_experts: int) -> Tensor:
    """Reshapes [experts * rank, n] to [experts, rank, n]."""
    return matrix.view(num_experts, -1, matrix.shape[1])


def _kind_of_each(counts: Tensor, num_rows: int) -> Tensor:
    """Returns the kind of each row, int64 [rows], -1 for none, from the rows' counts [experts, kinds]."""
    groups = torch.searchsorted(counts.flatten().cumsum(0), torch.arange(num_rows, device=counts.device), right=True)
    return torch.where(groups < counts.numel(), groups % counts.shape[1], -1)


def _within(kinds: Tensor, wanted: slice) -> Tensor:
    """Returns the positions of the kinds in `wanted`, in order; without gradients on a GPU, those of others after them,
    since their number is known to the GPU alone."""
    inside = (kinds >= wanted.start) & (kinds < wanted.stop)
    if kinds.is_cuda and not torch.is_grad_enabled():
        return inside.logical_not().argsort(stable=True)
    return inside.nonzero().squeeze(1)

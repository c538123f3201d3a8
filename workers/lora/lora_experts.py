"""Adds adapters to the experts of sparse layers: each expert's gate, up and down has a pair of matrices.

Pairs of token and expert are sorted by expert and adapter, so one grouped product (see ../ops/grouped_gemm.py) covers
the matrices of all experts of several adapters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops.grouped_gemm import GroupedRows
from .adapter import Adapter
from .segment import Segment

GATE_UP = ("gate_proj", "up_proj")
DOWN = ("down_proj",)

# On CUDA, ranks are padded to a multiple of this, so that rows of 16-bit numbers are multiples of 16 bytes.
_NATIVE_RANK = 8


@dataclass(frozen=True)
class AdapterBundle:
    """Adapters of equal rank and scale, which share products.

    kinds: the places of these adapters among all adapters of the plan.
    """

    adapters: tuple[Adapter, ...]
    kinds: slice

    @property
    def scale(self) -> float:
        return self.adapters[0].scale


class ExpertPlan:
    """Assigns each token of a packed row the adapter that its experts use, once for all sparse layers.

    adapters: those that adapt experts. The kind of a token is its adapter's place among them, or their number if it has
    none.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        pass_adapters: Sequence[Adapter],
        device: torch.device,
        before: "ExpertPlan | None" = None,
    ) -> None:
        """Sorts the adapters into bundles.

        Args:
            pass_adapters: adapters of the tokens that reach this rank's experts from any rank; all ranks list them in
                the same order.
            before: an earlier plan, whose copies are reused where the adapters are the same.
        """
        adapting = [adapter for adapter in dict.fromkeys(pass_adapters) if adapter.adapts_experts]
        self.adapters = sorted(adapting, key=_bundle_key)
        self.bundles = list(_bundles(self.adapters))
        kinds = {adapter: kind for kind, adapter in enumerate(self.adapters)}
        self._adapted = [(kinds[each.adapter], each) for each in segments if each.adapter in kinds]
        self._num_tokens = segments[-1].stop if segments else None
        self._device = device
        self._slots: Tensor | None = None
        self._copies: dict[tuple[str, tuple[Adapter, ...]], tuple[Tensor, Tensor]] = {}
        if before is not None:
            wanted = {bundle.adapters for bundle in self.bundles}
            self._copies = {key: copies for key, copies in before._copies.items() if key[1] in wanted}

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

    def terms(self, layer: str, counts: Tensor, has_bare: bool) -> "ExpertTerms | None":
        """Returns the terms for one call of the layer whose experts have this name, or None if no adapter adapts them.

        Args:
            counts: rows of each, int64 [experts, kinds].
            has_bare: whether some rows may be of the last kind, which has no adapter.
        """
        return ExpertTerms(self, layer, counts, has_bare) if self.adapters else None

    def factors(self, name: str, bundle: AdapterBundle, num_experts: int, is_kept: bool) -> tuple[Tensor, Tensor]:
        """Returns A [groups, rank, in] and B^T [groups, rank, out] of a bundle.

        Args:
            is_kept: whether to keep the copies for later calls.
        """
        key = name, bundle.adapters
        if key in self._copies:
            return self._copies[key]
        pairs = [adapter.vectors.weight_views()[name] for adapter in bundle.adapters]
        a, b = (_stacked([pair[side] for pair in pairs], num_experts) for side in (0, 1))
        # The matrices of a single adapter are used in place, and must not be held: they may be offloaded.
        if is_kept and len(pairs) > 1:
            self._copies[key] = a, b
        return a, b


class ExpertTerms:
    """The adapters' terms for one call of a sparse layer, forward and backward."""

    def __init__(self, plan: ExpertPlan, layer: str, counts: Tensor, has_bare: bool) -> None:
        is_kept = not torch.is_grad_enabled()
        is_whole = len(plan.bundles) == 1 and not has_bare
        kind_of_each = None if is_whole else _kind_of_each(counts)
        self._layer = layer
        self._parts = [_BundleTerms(plan, bundle, counts, kind_of_each, is_kept) for bundle in plan.bundles]
        self._gate_up: list[list[Tensor]] = []
        self._down: list[list[Tensor]] = []

    def add_gate_up(self, y: Tensor, x: Tensor) -> None:
        """Adds the terms of x [rows, hidden] to y [rows, 2 * features], gates first."""
        self._gate_up = [part.add(self._names(GATE_UP), y, x) for part in self._parts]

    def add_down(self, y: Tensor, x: Tensor) -> None:
        """Adds the terms of x [rows, features] to y [rows, hidden]."""
        self._down = [part.add(self._names(DOWN), y, x) for part in self._parts]

    def gate_up_backward(self, grad: Tensor, x: Tensor, grad_x: Tensor | None) -> None:
        """Adds to the gradients of A and B, and to `grad_x` unless it is None. `grad` is the gradient of y."""
        for part, reduced in zip(self._parts, self._gate_up, strict=True):
            part.backward(self._names(GATE_UP), grad, x, reduced, grad_x)

    def down_backward(self, grad: Tensor, x: Tensor, grad_x: Tensor) -> None:
        for part, reduced in zip(self._parts, self._down, strict=True):
            part.backward(self._names(DOWN), grad, x, reduced, grad_x)

    def _names(self, kinds: Sequence[str]) -> list[str]:
        return [f"{self._layer}.{kind}" for kind in kinds]


class _BundleTerms:
    """The rows of one bundle's adapters in one call of a layer."""

    def __init__(
        self, plan: ExpertPlan, bundle: AdapterBundle, counts: Tensor, kind_of_each: Tensor | None, is_kept: bool
    ) -> None:
        """Groups the bundle's rows by expert and adapter.

        Args:
            kind_of_each: int64, one per row; None if all rows are the bundle's.
        """
        self._plan, self._bundle, self._is_kept = plan, bundle, is_kept
        self._num_experts = len(counts)
        self._groups = GroupedRows(counts[:, bundle.kinds].flatten())
        self._rows = None if kind_of_each is None else _within(kind_of_each, bundle.kinds)

    def add(self, names: Sequence[str], y: Tensor, x: Tensor) -> list[Tensor]:
        """Returns what `backward` needs, one tensor per name."""
        own, kept = self._own(x), []
        for name, columns in zip(names, y.chunk(len(names), dim=1), strict=True):
            a, b = self._factors(name)
            reduced = self._groups.matmul(own, a.mT).mul_(self._bundle.scale)
            self._add_times(columns, reduced, b)
            kept.append(reduced)
        return kept

    def backward(
        self, names: Sequence[str], grad: Tensor, x: Tensor, reduced: Sequence[Tensor], grad_x: Tensor | None
    ) -> None:
        own_x, own_grad = self._own(x), self._own(grad)
        parts = own_grad.chunk(len(names), dim=1)
        for name, of_name, reduced_by_a in zip(names, parts, reduced, strict=True):
            a, b = self._factors(name)
            grad_reduced = self._groups.matmul(of_name, b.mT).mul_(self._bundle.scale)
            of_a, of_b = self._gradients(name)
            self._groups.add_outer(of_a, grad_reduced, own_x)
            self._groups.add_outer(of_b, reduced_by_a, of_name)
            if grad_x is not None:
                self._add_times(grad_x, grad_reduced, a)

    def _own(self, x: Tensor) -> Tensor:
        return x if self._rows is None else x.index_select(0, self._rows)

    def _add_times(self, y: Tensor, x: Tensor, matrices: Tensor) -> None:
        if self._rows is None:
            self._groups.add_matmul(y, x, matrices)
        else:
            y.index_add_(0, self._rows, self._groups.matmul(x, matrices))

    def _factors(self, name: str) -> tuple[Tensor, Tensor]:
        return self._plan.factors(name, self._bundle, self._num_experts, self._is_kept)

    def _gradients(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the tensors in which each adapter sums the gradients of A and B^T.

        Shapes are [experts, rank, in] and [experts, rank, out].
        """
        pairs = [adapter.gradients.of_lane().views[name] for adapter in self._bundle.adapters]
        of_a, of_b = ([_by_expert(pair[side], self._num_experts) for pair in pairs] for side in (0, 1))
        return of_a, of_b


def _bundle_key(adapter: Adapter) -> tuple[int, float]:
    """Returns the sort key that the adapters of a bundle share."""
    return adapter.lora.rank, adapter.scale


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


def _kind_of_each(counts: Tensor) -> Tensor:
    """Returns the kind of each row, int64 [rows], from the rows' counts [experts, kinds]."""
    kinds = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return kinds.repeat_interleave(counts.flatten())


def _within(kinds: Tensor, wanted: slice) -> Tensor:
    """Returns the positions of the kinds in `wanted`, in order."""
    return ((kinds >= wanted.start) & (kinds < wanted.stop)).nonzero().squeeze(1)

"""What adapters add to the experts of sparse layers: to each expert's gate, up and down a pair of matrices of its own.

Pairs of token and expert are sorted by expert and adapter, so a product with the matrices of all experts of several
adapters is one with groups of rows (see ../grouped.py).
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

# Ranks of a product in 16 bits on CUDA: rows are multiples of 16 bytes.
_NATIVE_RANK = 8


@dataclass(frozen=True)
class Bundle:
    """Adapters of one rank and scale, which share products. kinds: where they are among all of a plan."""

    adapters: tuple[Adapter, ...]
    kinds: slice

    @property
    def scale(self) -> float:
        return self.adapters[0].scale


class ExpertPlan:
    """Which adapter each token of a packed row has at its experts, decided once for all sparse layers.

    adapters: those that adapt experts; a token's kind is the place of its adapter among them, or their number.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        company: Sequence[Adapter],
        device: torch.device,
        before: "ExpertPlan | None" = None,
    ) -> None:
        """company: adapters whose tokens come here from any rank, on all of them in the same order. before: a plan
        whose copies serve on where they are of the same adapters."""
        adapting = [adapter for adapter in dict.fromkeys(company) if adapter.adapts_experts]
        self.adapters = sorted(adapting, key=_likeness)
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
    def has_bare(self) -> bool:
        """Whether some of this rank's tokens have no adapter at their experts."""
        return sum(segment.length for _, segment in self._adapted) != self._num_tokens

    def slots(self, num_tokens: int) -> Tensor:
        """int64 [num_tokens]: the kind of each."""
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
        """For one call of a layer, whose experts have this name. None where no adapter adapts them.

        counts: int64 [experts, kinds], the rows of each; has_bare: whether there may be some of the last kind.
        """
        return ExpertTerms(self, layer, counts, has_bare) if self.adapters else None

    def factors(self, name: str, bundle: Bundle, num_experts: int, is_kept: bool) -> tuple[Tensor, Tensor]:
        """A [groups, rank, in] and B^T [groups, rank, out]. is_kept: whether they serve later calls, too."""
        key = name, bundle.adapters
        if key in self._copies:
            return self._copies[key]
        pairs = [adapter.all_factors()[name] for adapter in bundle.adapters]
        a, b = (_stacked([pair[side] for pair in pairs], num_experts) for side in (0, 1))
        # What a single adapter has is used where it is, and must not be held: it may be paged out.
        if is_kept and len(pairs) > 1:
            self._copies[key] = a, b
        return a, b


class ExpertTerms:
    """Those of one call of a sparse layer: forward, and the way back where there is one."""

    def __init__(self, plan: ExpertPlan, layer: str, counts: Tensor, has_bare: bool) -> None:
        is_kept = not torch.is_grad_enabled()
        is_whole = len(plan.bundles) == 1 and not has_bare
        kind_of_each = None if is_whole else _kind_of_each(counts)
        self._layer = layer
        self._parts = [_Part(plan, bundle, counts, kind_of_each, is_kept) for bundle in plan.bundles]
        self._gate_up: list[list[Tensor]] = []
        self._down: list[list[Tensor]] = []

    def add_gate_up(self, y: Tensor, x: Tensor) -> None:
        """Adds to y [rows, 2 * features], gates first, the terms of x [rows, hidden]."""
        self._gate_up = [part.add(self._names(GATE_UP), y, x) for part in self._parts]

    def add_down(self, y: Tensor, x: Tensor) -> None:
        """Adds to y [rows, hidden] the terms of x [rows, features]."""
        self._down = [part.add(self._names(DOWN), y, x) for part in self._parts]

    def gate_up_backward(self, grad: Tensor, x: Tensor, grad_x: Tensor | None) -> None:
        """Adds to the gradients of A and B, and to that of x where there is one. grad: that of y."""
        for part, reduced in zip(self._parts, self._gate_up, strict=True):
            part.backward(self._names(GATE_UP), grad, x, reduced, grad_x)

    def down_backward(self, grad: Tensor, x: Tensor, grad_x: Tensor) -> None:
        for part, reduced in zip(self._parts, self._down, strict=True):
            part.backward(self._names(DOWN), grad, x, reduced, grad_x)

    def _names(self, kinds: Sequence[str]) -> list[str]:
        return [f"{self._layer}.{kind}" for kind in kinds]


class _Part:
    """The rows of a bundle's adapters, in one call of a layer."""

    def __init__(
        self, plan: ExpertPlan, bundle: Bundle, counts: Tensor, kind_of_each: Tensor | None, is_kept: bool
    ) -> None:
        """kind_of_each: int64 of the rows; None = they all are the bundle's."""
        self._plan, self._bundle, self._is_kept = plan, bundle, is_kept
        self._num_experts = len(counts)
        self._groups = GroupedRows(counts[:, bundle.kinds].flatten())
        self._rows = None if kind_of_each is None else _within(kind_of_each, bundle.kinds)

    def add(self, names: Sequence[str], y: Tensor, x: Tensor) -> list[Tensor]:
        """Returns, of each name, what `backward` needs."""
        own, kept = self._own(x), []
        for name, columns in zip(names, y.chunk(len(names), dim=1), strict=True):
            a, b = self._factors(name)
            reduced = self._groups.times(own, a.mT).mul_(self._bundle.scale)
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
            grad_reduced = self._groups.times(of_name, b.mT).mul_(self._bundle.scale)
            of_a, of_b = self._gradients(name)
            self._groups.add_outer(of_a, grad_reduced, own_x)
            self._groups.add_outer(of_b, reduced_by_a, of_name)
            if grad_x is not None:
                self._add_times(grad_x, grad_reduced, a)

    def _own(self, x: Tensor) -> Tensor:
        return x if self._rows is None else x.index_select(0, self._rows)

    def _add_times(self, y: Tensor, x: Tensor, matrices: Tensor) -> None:
        if self._rows is None:
            self._groups.add_times(y, x, matrices)
        else:
            y.index_add_(0, self._rows, self._groups.times(x, matrices))

    def _factors(self, name: str) -> tuple[Tensor, Tensor]:
        return self._plan.factors(name, self._bundle, self._num_experts, self._is_kept)

    def _gradients(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """Of each adapter: where those of A and B^T are summed, [experts, rank, in] and [experts, rank, out]."""
        pairs = [adapter.all_gradients()[name] for adapter in self._bundle.adapters]
        of_a, of_b = ([_by_expert(pair[side], self._num_experts) for pair in pairs] for side in (0, 1))
        return of_a, of_b


def _likeness(adapter: Adapter) -> tuple[int, float]:
    """Adapters that agree in it are of one bundle."""
    return adapter.lora.rank, adapter.scale


def _bundles(adapters: Sequence[Adapter]) -> Iterator[Bundle]:
    start = 0
    for _, members in groupby(adapters, key=_likeness):
        bundle = tuple(members)
        yield Bundle(bundle, slice(start, start + len(bundle)))
        start += len(bundle)


def _stacked(matrices: Sequence[Tensor], num_experts: int) -> Tensor:
    """[experts * rank, n] of each adapter -> [groups, rank, n], an expert's adapters one after the other."""
    by_expert = [_by_expert(matrix, num_experts) for matrix in matrices]
    rank = by_expert[0].shape[1]
    if matrices[0].is_cuda and rank % _NATIVE_RANK:
        by_expert = [pad(matrix, (0, 0, 0, -rank % _NATIVE_RANK)) for matrix in by_expert]
    return by_expert[0] if len(by_expert) == 1 else torch.stack(by_expert, dim=1).flatten(0, 1)


def _by_expert(matrix: Tensor, num_experts: int) -> Tensor:
    """[experts * rank, n] -> [experts, rank, n]"""
    return matrix.view(num_experts, -1, matrix.shape[1])


def _kind_of_each(counts: Tensor) -> Tensor:
    """counts [experts, kinds] of rows -> int64 [rows]"""
    kinds = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return kinds.repeat_interleave(counts.flatten())


def _within(kinds: Tensor, wanted: slice) -> Tensor:
    """Where these kinds are, in order."""
    return ((kinds >= wanted.start) & (kinds < wanted.stop)).nonzero().squeeze(1)

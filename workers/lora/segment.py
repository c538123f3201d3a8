"""Segments, the tokens of a packed row that run with one adapter, and groups of neighbours multiplied together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from ..state.trainable import Trainable
from .adapter import Adapter
from .segmented_matmul import SegmentedMatmul, choose_matmul

# A group's ranks are padded to its highest, which may be up to this many times their mean.
_MAX_PADDING = 3.0

# On the CPU, a segment of at least this many rows is worth a separate call.
_LONG = 192


@dataclass(frozen=True)
class Segment:
    """Tokens start:stop of the packed row, which run with this model; None is the bare base.

    If the trunk runs with a model that is not an adapter, this one has its own full weights, and all tokens of the row
    are its.
    """

    start: int
    stop: int
    model: Trainable | None

    @cached_property
    def adapter(self) -> Adapter | None:
        of_trunk = None if self.model is None else self.model.trunk_model
        return of_trunk if isinstance(of_trunk, Adapter) else None

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Neighbouring rows of different adapters that have the same matrices in the trunk, apart from ranks."""

    rows: slice
    adapters: tuple[Adapter, ...]
    matmul: SegmentedMatmul
    is_whole: bool
    """True if these are all rows of the packed row."""

    @cached_property
    def weights(self) -> list[Mapping[str, tuple[Tensor, Tensor]]]:
        """A and B^T by layer, of each adapter. They hold the weights on the device until the plan is dropped."""
        return [adapter.vectors.weight_views() for adapter in self.adapters]

    @cached_property
    def gradients(self) -> list[Mapping[str, tuple[Tensor, Tensor]]]:
        """The sums of the gradients of A and B^T by layer in this thread's lane, of each adapter."""
        return [adapter.gradients.of_lane().views for adapter in self.adapters]


def row_groups(segments: Sequence[Segment], device: torch.device, aligned: bool) -> list[RowGroup]:
    """Returns the groups of a packed row; `aligned` as for `choose_matmul`."""
    groups: list[RowGroup] = []
    for members in group_segments(segments, splits_long=device.type == "cpu"):
        adapters = tuple(segment.adapter for segment in members if segment.adapter is not None)
        lengths = [segment.stop - segment.start for segment in members]
        matmul = choose_matmul(lengths, [adapter.scale for adapter in adapters], device, aligned)
        rows = slice(members[0].start, members[-1].stop)
        groups.append(RowGroup(rows, adapters, matmul, rows == slice(0, segments[-1].stop)))
    return groups


def group_segments(segments: Sequence[Segment], splits_long: bool) -> list[list[Segment]]:
    """Groups neighbouring segments. Segments of the bare base, and empty ones, are in no group."""
    groups: list[list[Segment]] = []
    for segment in segments:
        if segment.adapter is None or segment.start == segment.stop:
            continue
        if groups and _can_append(groups[-1], segment.adapter, segment.start):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    if not splits_long or len(groups) == sum(map(len, groups)):
        return groups
    return [part for group in groups for part in _split_long(group)]


def _can_append(group: Sequence[Segment], adapter: Adapter, start: int) -> bool:
    """True if the adapter's segment may join. A second segment of an adapter may not: its gradients would collide."""
    adapters = [segment.adapter for segment in group if segment.adapter is not None]
    ranks = [other.lora.rank for other in (*adapters, adapter)]
    return (
        start == group[-1].stop
        and adapter.layer_flags == adapters[0].layer_flags
        and all(adapter is not other for other in adapters)
        and max(ranks) * len(ranks) / sum(ranks) <= _MAX_PADDING
    )


def _split_long(group: list[Segment]) -> Iterator[list[Segment]]:
    """Yields long segments separately, unless all are equally long."""
    if len({segment.length for segment in group}) == 1:
        yield group
        return
    for is_long, members in groupby(group, key=lambda segment: segment.length >= _LONG):
        if is_long:
            yield from ([segment] for segment in members)
        else:
            yield list(members)


def overlap(tokens: slice, start: int, stop: int) -> slice:
    """Returns which of `tokens`, counted from their first, are in start:stop."""
    step = tokens.step or 1
    number = len(range(tokens.start, tokens.stop, step))
    first, end = (min(max(0, -((tokens.start - bound) // step)), number) for bound in (start, stop))
    return slice(first, end)


def clip_segments(segments: Sequence[Segment], tokens: slice) -> list[Segment]:
    """Returns the parts of the segments inside `tokens`, counted from its first token."""
    parts = [(overlap(tokens, segment.start, segment.stop), segment.model) for segment in segments]
    return [Segment(part.start, part.stop, model) for part, model in parts if part.start < part.stop]

"""Segments, the tokens of a packed row that run with one adapter, and groups, neighbours multiplied together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from ..parallel.token_shard import overlap
from ..state.trainable import Trainable
from .adapter import Adapter

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


@dataclass(frozen=True)
class SegmentGroup:
    """Neighbouring, non-empty segments of different adapters with the same matrices in the trunk, apart from ranks."""

    segments: tuple[Segment, ...]

    @property
    def rows(self) -> slice:
        return slice(self.segments[0].start, self.segments[-1].stop)

    @property
    def adapters(self) -> list[Adapter]:
        return [segment.adapter for segment in self.segments if segment.adapter is not None]

    @property
    def lengths(self) -> list[int]:
        return [segment.length for segment in self.segments]

    @property
    def scales(self) -> list[float]:
        return [adapter.scale for adapter in self.adapters]

    def can_append(self, segment: Segment) -> bool:
        """True if the next segment may join. A second segment of an adapter may not: its gradients would collide."""
        adapters, adapter = self.adapters, segment.adapter
        return (
            adapter is not None
            and segment.start == self.rows.stop
            and adapter.layer_flags == adapters[0].layer_flags
            and all(adapter is not other for other in adapters)
            and _padding([*adapters, adapter]) <= _MAX_PADDING
        )

    def split(self) -> Iterator["SegmentGroup"]:
        """Yields long segments separately, unless all are equally long."""
        if len(set(self.lengths)) == 1:
            yield self
            return
        for long, members in groupby(self.segments, key=lambda segment: segment.length >= _LONG):
            if long:
                yield from (SegmentGroup((segment,)) for segment in members)
            else:
                yield SegmentGroup(tuple(members))


def group_segments(segments: Sequence[Segment]) -> list[SegmentGroup]:
    """Groups neighbouring segments. Segments of the bare base, and empty ones, are in no group."""
    groups: list[SegmentGroup] = []
    for segment in segments:
        if segment.adapter is None or not segment.length:
            continue
        if groups and groups[-1].can_append(segment):
            groups[-1] = SegmentGroup((*groups[-1].segments, segment))
        else:
            groups.append(SegmentGroup((segment,)))
    return groups


def _padding(adapters: Sequence[Adapter]) -> float:
    """Returns the highest rank divided by the mean rank."""
    ranks = [adapter.lora.rank for adapter in adapters]
    return max(ranks) * len(ranks) / sum(ranks)


def clip_segments(segments: Sequence[Segment], tokens: slice) -> list[Segment]:
    """Returns the parts of the segments inside `tokens`, counted from its first token."""
    parts = [(overlap(tokens, segment.start, segment.stop), segment.model) for segment in segments]
    return [Segment(part.start, part.stop, model) for part, model in parts if part.start < part.stop]

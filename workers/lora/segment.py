"""Segment: tokens of a packed row that run with one adapter; and Group: neighbours that are multiplied together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..parallel.rows import overlap
from ..state.trainable import Learner
from .adapter import Adapter

# A group's ranks are padded to its highest, which may be this many times their mean.
_MOST_PADDING = 3.0

# On the CPU, products of so many rows are worth a call of their own.
_LONG = 192


@dataclass(frozen=True)
class Segment:
    """Tokens start:stop of the packed row run for this model; None = the bare base.

    Where the trunk runs with one that is no adapter, this has weights of its own: all tokens of the row are its.
    """

    start: int
    stop: int
    model: Learner | None

    @property
    def adapter(self) -> Adapter | None:
        of_trunk = None if self.model is None else self.model.of_trunk
        return of_trunk if isinstance(of_trunk, Adapter) else None

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Group:
    """Neighbouring segments, none empty, of different adapters that adapt the same layers of the trunk."""

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

    def takes(self, segment: Segment) -> bool:
        """Whether the next segment may join: not an adapter's second one, whose gradients would collide."""
        adapters, adapter = self.adapters, segment.adapter
        return (
            adapter is not None
            and segment.start == self.rows.stop
            and _layers(adapter) == _layers(adapters[0])
            and all(adapter is not other for other in adapters)
            and _padding([*adapters, adapter]) <= _MOST_PADDING
        )

    def split(self) -> Iterator["Group"]:
        """Long segments apart, unless all are equally long."""
        if len(set(self.lengths)) == 1:
            yield self
            return
        for long, members in groupby(self.segments, key=lambda segment: segment.length >= _LONG):
            if long:
                yield from (Group((segment,)) for segment in members)
            else:
                yield Group(tuple(members))


def grouped(segments: Sequence[Segment]) -> list[Group]:
    """Segments of the bare base, and empty ones, are in no group."""
    groups: list[Group] = []
    for segment in segments:
        if segment.adapter is None or not segment.length:
            continue
        if groups and groups[-1].takes(segment):
            groups[-1] = Group((*groups[-1].segments, segment))
        else:
            groups.append(Group((segment,)))
    return groups


def _layers(adapter: Adapter) -> tuple[bool, bool]:
    """What decides which layers of the trunk it adapts."""
    return adapter.lora.train_attn, adapter.lora.train_mlp


def _padding(adapters: Sequence[Adapter]) -> float:
    """The highest rank by the mean one."""
    ranks = [adapter.lora.rank for adapter in adapters]
    return max(ranks) * len(ranks) / sum(ranks)


def within(segments: Sequence[Segment], rows: slice) -> list[Segment]:
    """The segments of `rows`, counted from their first."""
    parts = [(overlap(rows, segment.start, segment.stop), segment.model) for segment in segments]
    return [Segment(part.start, part.stop, model) for part, model in parts if part.start < part.stop]

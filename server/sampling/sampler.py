"""Sampler: a sampling session of one client or of many, and the requests that it has accepted."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from ..store import CheckpointRecord, SamplerRecord


@dataclass(eq=False)
class Sampler:
    """adapter_id: None = the bare base model. loading: the adapter's, once it was asked for. draft: that of its record,
    once it was asked for.

    first_seq_id: of the requests that leave theirs out, not 0 where an earlier process has made the sampler. accepted:
    seq_id -> its submit being journaled, None once it was. under_way: ids of the jobs that are loading or sampling.
    """

    record: SamplerRecord
    adapter_id: str | None
    first_seq_id: int = 0
    loading: asyncio.Future[None] | None = None
    accepted: dict[int, asyncio.Task[None] | None] = field(default_factory=dict)
    under_way: set[str] = field(default_factory=set)
    drawing_numbers: Iterator[int] = field(default_factory=partial(count, 1))
    num_joined: int = 0
    draft: CheckpointRecord | None = None
    is_over: bool = False

    def free_seq_id(self) -> int:
        next_seq_id = self.first_seq_id + len(self.accepted)
        return next_seq_id if next_seq_id not in self.accepted else max(self.accepted) + 1

    def next_drawing_id(self) -> str:
        """Of a request that is answered with its samples; never a seq_id's. In any thread."""
        return f"{self.record.sampler_id}:draw-{next(self.drawing_numbers)}"

    def join(self) -> int:
        """A number for one more client, from 1."""
        self.num_joined += 1
        return self.num_joined

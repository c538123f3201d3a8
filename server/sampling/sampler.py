"""Represents a sampling session, which one or several clients use, and the requests that it has accepted."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from ..store import CheckpointRecord, SamplerRecord


@dataclass(eq=False)
class Sampler:
    """One live sampling session."""

    record: SamplerRecord
    adapter_id: str | None
    """Id of its weights in the workers; None for the bare base model, and if the weights are lost."""
    first_seq_id: int = 0
    """First number for requests without a seq_id; not 0 if an earlier process created the sampler."""
    accepted: dict[int, asyncio.Task[None] | None] = field(default_factory=dict)
    """Tasks that journal requests, by seq_id; None when it is done."""
    running_jobs: set[str] = field(default_factory=set)
    """Ids of the jobs that are loading or sampling."""
    sample_now_numbers: Iterator[int] = field(default_factory=partial(count, 1))
    """Numbers of the requests of `SamplingService.sample_now`, which have no seq_id. Thread-safe."""
    num_joined: int = 0
    """Clients that have joined the session."""
    draft: CheckpointRecord | None = None
    """The record's draft; None before the first request."""
    has_ended: bool = False
    outage: str | None = None
    """The reason why its requests wait for the database; None if they do not."""

    def free_seq_id(self) -> int:
        next_seq_id = self.first_seq_id + len(self.accepted)
        return next_seq_id if next_seq_id not in self.accepted else max(self.accepted) + 1

    def join(self) -> int:
        """Returns a number for another client, counting from 1."""
        self.num_joined += 1
        return self.num_joined

"""Keeps track of the snapshots that a group's ranks write while they do other work."""

import math
from collections.abc import Mapping
from itertools import count

from ..protocol.calls import Failure
from .quarantine import Suspects
from .supervision.backoff import backoff
from .work import SnapshotWork

_MAX_SNAPSHOTS = 4
_FIRST_SECONDS, _LONGEST_SECONDS = 0.01, 0.5


class PendingSnapshots:
    """The snapshots that the ranks write while they do other work."""

    def __init__(self, suspects: Suspects) -> None:
        """Starts with none.

        Args:
            suspects: runs whose last snapshot was lost with a worker; the next one is written while nothing else runs.
        """
        self.due_at = math.inf
        """The monotonic time at which the ranks are polled for finished ones; infinite while none is being written."""
        self._suspects = suspects
        self._writing: dict[int, SnapshotWork] = {}
        self._ids = count()
        self._num_polls = 0

    @property
    def has_suspect(self) -> bool:
        return any(work.key in self._suspects for work in self._writing.values())

    def has_room(self, work: SnapshotWork) -> bool:
        """True if this snapshot may begin; each holds a copy of its run in the worker's memory."""
        return len(self._writing) < (1 if work.key in self._suspects else _MAX_SNAPSHOTS)

    def works(self) -> list[SnapshotWork]:
        return list(self._writing.values())

    def next_id(self) -> int:
        return next(self._ids)

    def add(self, snapshot_id: int, work: SnapshotWork, now: float) -> None:
        self._writing[snapshot_id] = work
        self._num_polls = 0
        self._poll_later(now)

    def settle(self, answers: Mapping[int, Failure | None], now: float) -> None:
        """Answers the snapshots that ended, and polls for the others at growing intervals."""
        for snapshot_id, answer in answers.items():
            if (work := self._writing.pop(snapshot_id, None)) is not None:
                work.settle(answer)
                self._suspects.pop(work.key, None)  # the worker outlived it
        self._poll_later(now)

    def fail_all(self, failure: Failure, now: float) -> None:
        """Fails all snapshots, because their outcome is unknown."""
        self.settle(dict.fromkeys(self._writing, failure), now)

    def _poll_later(self, now: float) -> None:
        self.due_at = math.inf
        if self._writing:
            self._num_polls += 1
            self.due_at = now + backoff(self._num_polls, _FIRST_SECONDS, _LONGEST_SECONDS)

"""Tracks the snapshots that a worker writes while it does other work, and the callers that wait for them."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from ..protocol.calls import Failure
from .backoff import backoff
from .work import SnapshotRequest, WorkItem

_MOST = 4
_FIRST_SECONDS, _LONGEST_SECONDS = 0.01, 0.5


class PendingSnapshots:
    """The snapshots of one group that are being written.

    The group polls the worker for finished ones whenever `is_due` is True; `on_due` is called at that time.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self.is_due = False
        self._on_due = on_due
        self._writing: dict[int, WorkItem[SnapshotRequest]] = {}
        self._ids = count()
        self._num_polls = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_room(self) -> bool:
        """True if another snapshot may begin; each holds a copy of its run in the worker's memory."""
        return len(self._writing) < _MOST

    def works(self) -> list[WorkItem[SnapshotRequest]]:
        return list(self._writing.values())

    def next_id(self) -> int:
        return next(self._ids)

    def add(self, snapshot_id: int, work: WorkItem[SnapshotRequest]) -> None:
        self._writing[snapshot_id] = work
        self._num_polls = 0
        self._ask_later()

    def take_ended(
        self, answers: Mapping[int, Failure | None]
    ) -> list[tuple[WorkItem[SnapshotRequest], Failure | None]]:
        """Returns the work of the snapshots that ended, with their answers, and polls for the others at growing
        intervals.
        """
        works = [(self._writing.pop(one), answer) for one, answer in answers.items() if one in self._writing]
        self._ask_later()
        return works

    def fail_all(self, failure: Failure) -> list[tuple[WorkItem[Any], Failure | None]]:
        """Fails all snapshots, because their outcome is unknown."""
        return self.take_ended(dict.fromkeys(self._writing, failure))

    def forget(self) -> None:
        """Forgets all snapshots, because the worker has died."""
        self._writing.clear()
        self._ask_later()

    def _ask_later(self) -> None:
        self.is_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing:
            self._num_polls += 1
            seconds = backoff(self._num_polls, _FIRST_SECONDS, _LONGEST_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._become_due)

    def _become_due(self) -> None:
        self.is_due = True
        self._on_due()

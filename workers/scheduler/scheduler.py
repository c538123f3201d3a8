"""Decides which call a group's ranks make next. Makes no calls and awaits nothing, so that it can be tested alone."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from .group_work import GroupWork
from .rank_calls import (
    BeginSnapshotCall,
    MethodCall,
    PassCall,
    PollSnapshotsCall,
    RankCall,
    SliceCall,
    StepsCall,
)

# Lengths of the first slices after a pause, as fractions of a slice.
_FIRST_SLICES = (1 / 16, 1 / 4)


class Scheduler:
    """Shares the ranks of a group between kinds of calls: training, methods, snapshots and sampling.

    Each `next_call` must be followed by `finish`, or by `GroupWork.worker_died`, before the next one.
    """

    def __init__(self, work: GroupWork, slice_milliseconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._work = work
        self._slice_milliseconds = slice_milliseconds
        self._clock = clock
        self._slices_since_pause = 0
        self._shares = TimeShares(("training", "methods", "snapshots", "sampling"))

    def wanted(self) -> list[str]:
        """Returns the kinds of calls for which there is work."""
        queue = self._work.queue
        wants = {
            "training": queue.wants_training,
            "methods": queue.wants_method,
            "snapshots": self._snapshots_due or (queue.wants_snapshot and self._work.snapshots.has_room),
            "sampling": self._work.cohorts.wants_slice,
        }
        return [kind for kind, is_wanted in wants.items() if is_wanted]

    def without_device(self, kinds: Sequence[str]) -> list[str]:
        """Returns those of the wanted kinds whose next call needs nothing on the devices."""
        return [kind for kind in kinds if self._runs_anywhere(kind)]

    def seconds_to_poll(self) -> float | None:
        """Returns the seconds until the snapshots that are being written must be polled; None if there are none."""
        due_at = self._work.snapshots.due_at
        return None if due_at == math.inf else max(0.0, due_at - self._clock())

    def next_call(self, kinds: Sequence[str]) -> RankCall:
        """Takes the next call's work from the queue.

        Args:
            kinds: of `wanted`, those that are possible now.
        """
        match self._shares.next(kinds):
            case "training":
                return self._next_training()
            case "methods":
                return MethodCall(self._work.queue.take_method())
            case "snapshots":
                return self._next_snapshot()
            case _:
                return self._next_slice()

    def finish(self, call: RankCall, answer: Any, seconds: float) -> None:
        """Answers the call's work. Args: see RankCall.finish; seconds: the time it took."""
        call.finish(self._work, answer, self._clock())
        self._shares.charge(call.kind, seconds)

    @property
    def _snapshots_due(self) -> bool:
        return self._clock() >= self._work.snapshots.due_at

    def _runs_anywhere(self, kind: str) -> bool:
        if kind == "snapshots":
            return self._snapshots_due
        return kind == "methods" and not self._work.queue.next_method().needs_device

    def _next_training(self) -> RankCall:
        if self._work.queue.steps_are_next():
            return StepsCall(self._work.queue.take_steps(), self._work)
        return PassCall(self._work.queue.take_pass())

    def _next_snapshot(self) -> RankCall:
        if self._snapshots_due:
            return PollSnapshotsCall()
        return BeginSnapshotCall(self._work.queue.take_snapshot(), self._work.snapshots.next_id())

    def _next_slice(self) -> RankCall:
        """Returns the next slice. The first slices after a pause are short, because a client that sends one sampling
        request mostly sends more right after it.
        """
        cohort = self._work.cohorts.next()
        is_pause = len(self._work.cohorts) == len(cohort.joining)
        number = self._slices_since_pause = 0 if is_pause else self._slices_since_pause + 1
        part = _FIRST_SLICES[number] if number < len(_FIRST_SLICES) else 1
        return SliceCall(cohort, self._slice_milliseconds * part)


class TimeShares:
    """Shares the ranks' time between kinds of work: of those that have work, the one that has used the least time goes
    next.

    Each kind has a clock of the seconds it used. A kind without work is set forward to the clock of the one that runs,
    so that idle time earns no credit; time used while others waited stays on its account.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._seconds = dict.fromkeys(kinds, 0.0)

    def next(self, wanting: Sequence[str]) -> str:
        """Returns the kind to run next; the first one on a tie."""
        kind = min(wanting, key=self._seconds.__getitem__)
        for idle in self._seconds.keys() - set(wanting):
            self._seconds[idle] = max(self._seconds[idle], self._seconds[kind])
        return kind

    def charge(self, kind: str, seconds: float) -> None:
        self._seconds[kind] += seconds

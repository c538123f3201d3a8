"""Decides which call a group's ranks make next. Makes no calls and awaits nothing, so that it can be tested alone."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..protocol.calls import Failure
from .calls import BeginSnapshotCall, MethodCall, PassCall, PollSnapshotsCall, RankCall, SliceCall, StepsCall
from .group_work import GroupWork
from .queue import Kind

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

    def ready(self, on_device: bool = True) -> list[Kind]:
        """Returns the kinds of calls for which there is work.

        Args:
            on_device: false if the group does not hold its devices, so that only what needs none can run.
        """
        work, num_ready, kinds = self._work, self._work.queue.num_ready, list[Kind]()
        if on_device and num_ready["training"]:
            kinds.append("training")
        if num_ready["methods"] and (on_device or work.queue.next_method().method.runs_offloaded):
            kinds.append("methods")
        may_begin = on_device and num_ready["snapshots"] and work.snapshots.has_room
        if may_begin or self._clock() >= work.snapshots.due_at:
            kinds.append("snapshots")
        if on_device and work.cohorts.has_work:
            kinds.append("sampling")
        return kinds

    def next_call(self, on_device: bool = True) -> RankCall[Any] | None:
        """Takes the work of the next call from the queue; None if none can run now. Args: as in `ready`."""
        kinds = self.ready(on_device)
        if not kinds:
            return None
        work, queue = self._work, self._work.queue
        match self._shares.next(kinds):
            case "training" if queue.steps_are_next:
                return StepsCall(queue.take_steps(), work)
            case "training":
                return PassCall(queue.take_pass())
            case "methods":
                return MethodCall(queue.take_method())
            case "snapshots" if self._clock() >= work.snapshots.due_at:
                return PollSnapshotsCall()
            case "snapshots":
                return BeginSnapshotCall(queue.take_snapshot(), work.snapshots.next_id())
            case "sampling":
                return self._next_slice()

    def finish(self, call: RankCall[Any], answer: object | Failure, seconds: float) -> None:
        """Answers the call's work. Args: see RankCall.finish; seconds: the time it took."""
        call.finish(self._work, answer, self._clock())
        self._shares.charge(call.kind, seconds)

    def _next_slice(self) -> SliceCall:
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

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._seconds = dict.fromkeys(kinds, 0.0)

    def next(self, wanting: Sequence[Kind]) -> Kind:
        """Returns the kind to run next; the first one on a tie."""
        kind = min(wanting, key=self._seconds.__getitem__)
        for idle in self._seconds.keys() - set(wanting):
            self._seconds[idle] = max(self._seconds[idle], self._seconds[kind])
        return kind

    def charge(self, kind: Kind, seconds: float) -> None:
        self._seconds[kind] += seconds

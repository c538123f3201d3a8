"""Turns of a run's operations: since when each waits for the ranks alone, and not for earlier ones of its run."""

import time

from ...workers.scheduler.work import CallSize


class Turns:
    """The turns of one run. Times are monotonic.

    An operation is ready when it and all before it have arrived, and those before it have ended or began in the same
    call of the ranks.
    """

    def __init__(self) -> None:
        self._arrived_at = 0.0
        self._ended_at = 0.0
        self._running: set[int] = set()  # seq_ids of operations that have begun
        self._call: CallSize | None = None  # the last one with an operation of the run
        self._free_at = 0.0  # when the operations before that call had ended

    def queue(self, arrived_at: float) -> float:
        """Returns when all operations up to this one had arrived. Call it in the order of seq_ids."""
        self._arrived_at = max(self._arrived_at, arrived_at)
        return self._arrived_at

    def begin(self, seq_id: int, call: CallSize | None) -> float:
        """Returns when the operations before this one had ended; call: which the ranks are sent with a part of it."""
        if call is None or call is not self._call:
            self._call, self._free_at = call, time.monotonic() if self._running - {seq_id} else self._ended_at
        self._running.add(seq_id)
        return self._free_at

    def end(self, seq_id: int) -> None:
        self._running.discard(seq_id)
        self._ended_at = time.monotonic()

"""Replay log of a run: the operations that a rebuild, or the answer to a client, still needs from the journal."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from enum import Enum

from ...schemas.errors import OperationError
from ..files.segment_log import RecordPosition
from ..journal.strikes import REBUILD_STRIKE, STRIKES
from ..operations.loading import CreateRun, CreateRunFromCheckpoint
from ..operations.operation import Outcome, RefusedOperation, ReplayEntry
from ..operations.registry import CLEARING_KINDS, STATE_KINDS, TAINTING_KINDS, TARGET_KINDS
from ..operations.training import OptimStep

_PAUSE_SECONDS = 0.05

_REPLAYED_KINDS = STATE_KINDS - {CreateRun.kind, CreateRunFromCheckpoint.kind, OptimStep.kind, RefusedOperation.kind}
"""Kinds that a rebuild replays, in addition to creation and optimizer steps."""


def ends_window(entry: ReplayEntry) -> bool:
    """True if no failure before this operation, which has ended, makes a later step wrong."""
    if entry.kind == OptimStep.kind:
        return entry.outcome is not Outcome.SERVER_FAILED
    return entry.kind in CLEARING_KINDS and entry.outcome is Outcome.DONE


def taints_window(entry: ReplayEntry) -> bool:
    """True if the next optimizer step would be wrong without the ended operation."""
    return entry.taints or (entry.kind in TAINTING_KINDS and entry.outcome is not Outcome.DONE)


class ReplayAction(Enum):
    """An action of a rebuild for a logged operation. REPLAY: run it again. CLEAR: drop the pending gradients."""

    REPLAY = "replay"
    CLEAR = "clear"


class ReplayLog:
    """The replay log of a run.

    release: called with the journal place of each operation that is no longer needed.
    """

    def __init__(self, release: Callable[[RecordPosition], None]) -> None:
        self._release = release
        self._entries: dict[ReplayEntry, None] = {}
        self._num_steps = self._num_bytes = 0

    def add(self, entry: ReplayEntry) -> None:
        """Adds an operation that has begun; call it in the order of seq_ids."""
        entry.added_at = time.monotonic()
        entry.is_covered |= entry.kind not in STATE_KINDS and entry.kind not in STRIKES
        self._entries[entry] = None
        if not entry.is_covered:
            self._num_steps += entry.kind == OptimStep.kind
            self._num_bytes += entry.num_bytes
        if entry.is_result_stored:
            self._release_unneeded([entry])

    def add_strike(self, kind: str, seq_id: int, place: RecordPosition) -> None:
        """Adds a journaled strike against the operation, or against a rebuild from the snapshot of this seq_id."""
        self.add(ReplayEntry(seq_id, kind, place, outcome=Outcome.FAILED, is_result_stored=True))

    def mark_result_stored(self, entry: ReplayEntry) -> None:
        """Marks the operation's result as durable."""
        entry.is_result_stored = True
        self._release_unneeded([entry])

    def is_due(self, most_steps: float, most_bytes: float) -> bool:
        """True if that many steps or bytes were added since the last snapshot was begun; resets both counts then."""
        if self._num_steps < most_steps and self._num_bytes < most_bytes:
            return False
        self._num_steps = self._num_bytes = 0
        return True

    def is_older_than(self, seconds: float) -> bool:
        """True if a rebuild would need an operation older than that; strikes against rebuilding do not count."""
        needed = (entry for entry in self._entries if not entry.is_covered and entry.kind != REBUILD_STRIKE)
        oldest = min((entry.added_at for entry in needed), default=math.inf)
        return oldest < time.monotonic() - seconds

    def cover(self, seq_id: float) -> None:
        """Marks the operations up to this seq_id as not needed for a rebuild, or all if the run is over (infinity)."""
        covered = [entry for entry in self._entries if entry.seq_id <= seq_id]
        for entry in covered:
            entry.is_covered = True
        self._release_unneeded(covered)

    async def all_answered(self, seq_id: int) -> None:
        """Waits until the results of all operations up to this seq_id are durable."""
        while any(not entry.is_result_stored for entry in self._entries if entry.seq_id <= seq_id):  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_SECONDS)

    def newest_target(self, after: int, until: int) -> int | None:
        """Returns the seq_id of the newest successful operation that set the target of a draft, or may have when it
        created the run, after one seq_id and up to another; None if there is none."""
        found = (
            entry.seq_id
            for entry in self._entries
            if entry.kind in TARGET_KINDS and after < entry.seq_id <= until and entry.outcome is Outcome.DONE
        )
        return max(found, default=None)

    def replay_actions(self, after: int, is_tainted: bool) -> Iterator[tuple[ReplayEntry, ReplayAction]]:
        """Yields what a rebuild must do after loading a snapshot of seq_id `after`, in order.

        Args:
            is_tainted: whether the snapshot's gradient window is tainted.
        Raises:
            OperationError: the outcome of an operation is unknown.
        """
        for entry in sorted(self._entries, key=lambda entry: entry.seq_id):
            if entry.seq_id <= after or (entry.outcome is None and not entry.is_result_stored):
                continue
            if entry.outcome is None:
                raise OperationError(f"the outcome of {entry.kind} with seq_id {entry.seq_id} is not known", "server")
            if entry.kind == OptimStep.kind and ends_window(entry):
                clears = is_tainted or entry.outcome is Outcome.POISONED
                yield entry, ReplayAction.CLEAR if clears else ReplayAction.REPLAY
            elif entry.kind in _REPLAYED_KINDS and entry.outcome is Outcome.DONE:
                yield entry, ReplayAction.REPLAY
            is_tainted = taints_window(entry) or (is_tainted and not ends_window(entry))

    def _release_unneeded(self, entries: list[ReplayEntry]) -> None:
        for entry in entries:
            if entry.is_result_stored and entry.is_covered and entry in self._entries:
                del self._entries[entry]
                assert entry.place is not None
                self._release(entry.place)

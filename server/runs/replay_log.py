"""Replay log of a run: its operations since the last snapshots that changed its state, each held in the journal."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from ...schemas.errors import OperationError
from ..files.wal import RecordPosition
from ..journal.quarantine import REBUILD_STRIKE, STRIKES

_PAUSE_SECONDS = 0.05

REFUSED = "refused"
"""Kind of an operation that was not accepted."""

STATE_KINDS = {
    "create_model",
    "create_model_from_checkpoint",
    "forward_backward",
    "optim_step",
    "load_weights",
    "set_target",
    "build_vocab_map",
    *STRIKES,
    REFUSED,
}
"""Kinds of entries without which a run's state cannot be rebuilt."""

CLEARS_GRADIENTS = {"load_weights", "build_vocab_map"}
"""Kinds that clear pending gradients, so failures before them do not taint the next step."""

_REPEATED = {"forward_backward", "load_weights", "set_target", "build_vocab_map"}
"""Kinds that a rebuild repeats, in addition to creation and optimizer steps."""


class Outcome(Enum):
    """The way an operation ended.

    FAILED: the request was at fault, and would fail again. SERVER_FAILED: the server was at fault, and a retry may
    succeed. POISONED: workers crashed running it. After a step that is SERVER_FAILED the gradients are still pending; a
    POISONED one took them along with its worker.
    """

    DONE = "done"
    FAILED = "failed"
    SERVER_FAILED = "broke"
    POISONED = "struck"


class ReplayAction(Enum):
    """An action of a rebuild for a logged operation. AGAIN: run it again. CLEAR: drop the pending gradients."""

    AGAIN = "again"
    CLEAR = "clear"


@dataclass(eq=False)
class ReplayEntry:
    """An operation that was begun.

    outcome: None until it has ended, or if it is no longer known. taints: the next step would be wrong without it.
    is_answered: its result is durable, or it has none. is_covered: by the two newest snapshots, or it changed no state.
    added_at: monotonic.
    """

    seq_id: int
    kind: str
    place: RecordPosition
    num_bytes: int = 0
    outcome: Outcome | None = None
    taints: bool = False
    is_answered: bool = False
    is_covered: bool = False
    added_at: float = field(default_factory=time.monotonic)

    @property
    def is_needed(self) -> bool:
        return not (self.is_answered and self.is_covered)


class ReplayLog:
    """The replay log of a run.

    release: called with the journal place of each operation that is no longer needed.
    """

    def __init__(self, release: Callable[[RecordPosition], None]) -> None:
        self._release = release
        self._pasts: dict[ReplayEntry, None] = {}
        self._num_steps = self._num_bytes = 0

    def add(self, past: ReplayEntry) -> ReplayEntry:
        """Adds an operation; call it in the order of seq_ids."""
        past.is_covered |= past.kind not in STATE_KINDS
        self._pasts[past] = None
        if not past.is_covered:
            self._num_steps += past.kind == "optim_step"
            self._num_bytes += past.num_bytes
        self._let_go([past])
        return past

    def mark_answered(self, past: ReplayEntry) -> None:
        """Marks the operation's result as durable."""
        past.is_answered = True
        self._let_go([past])

    def is_due(self, most_steps: float, most_bytes: float) -> bool:
        """True if that many steps or bytes were added since the last snapshot was begun; resets both counts then."""
        if self._num_steps < most_steps and self._num_bytes < most_bytes:
            return False
        self._num_steps = self._num_bytes = 0
        return True

    def is_older_than(self, seconds: float) -> bool:
        """True if a rebuild would need an operation older than that; strikes against rebuilding do not count."""
        needed = (past for past in self._pasts if not past.is_covered and past.kind != REBUILD_STRIKE)
        oldest = min((past.added_at for past in needed), default=math.inf)
        return oldest < time.monotonic() - seconds

    def cover(self, seq_id: int) -> None:
        """Marks the operations up to this seq_id as not needed for a rebuild."""
        covered = [past for past in self._pasts if past.seq_id <= seq_id]
        for past in covered:
            past.is_covered = True
        self._let_go(covered)

    async def all_answered(self, seq_id: int) -> None:
        """Waits until the results of all operations up to this seq_id are durable."""
        while any(not past.is_answered for past in self._pasts if past.seq_id <= seq_id):  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_SECONDS)

    def replay_actions(self, after: int, is_tainted: bool) -> Iterator[tuple[ReplayEntry, ReplayAction]]:
        """Yields what a rebuild must do after loading a snapshot of seq_id `after`, in order.

        Args:
            is_tainted: whether the snapshot's gradient window is tainted.
        Raises:
            OperationError: the outcome of an operation is unknown.
        """
        for past in sorted(self._pasts, key=lambda past: past.seq_id):
            if past.seq_id <= after or (past.outcome is None and not past.is_answered):
                continue
            if past.outcome is None:
                raise OperationError(f"the outcome of {past.kind} with seq_id {past.seq_id} is not known", "server")
            is_done = past.outcome is Outcome.DONE
            if past.kind == "optim_step" and past.outcome is Outcome.SERVER_FAILED and not is_tainted:
                continue
            if past.kind == "optim_step":
                clears = is_tainted or past.outcome is Outcome.POISONED
                yield past, ReplayAction.CLEAR if clears else ReplayAction.AGAIN
                is_tainted = False
            elif past.kind in _REPEATED and is_done:
                yield past, ReplayAction.AGAIN
                is_tainted &= past.kind not in CLEARS_GRADIENTS
            is_tainted |= past.taints or (past.kind == "forward_backward" and not is_done)

    def close(self) -> None:
        """Releases everything, since the run is over."""
        for past in self._pasts:
            past.is_covered = True
        self._let_go(list(self._pasts))

    def _let_go(self, pasts: list[ReplayEntry]) -> None:
        for past in pasts:
            if not past.is_needed and past in self._pasts:
                del self._pasts[past]
                self._release(past.place)

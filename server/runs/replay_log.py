"""History: the operations of a run that changed its state since its last snapshots, each held in the journal."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from ...schemas.errors import OperationError
from ..files.wal import Place
from ..journal.quarantine import REBUILD_STRIKE, STRIKES

_PAUSE_SECONDS = 0.05

REFUSED = "refused"
"""The kind of whatever was not accepted."""

KEPT = {
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
"""The kinds without which a run's state cannot be made again."""

BEGINS_WINDOW = {"load_weights", "build_vocab_map"}
"""The kinds behind which no gradients wait: what failed before them is no part of the next step."""

_REPEATED = {"forward_backward", "load_weights", "set_target", "build_vocab_map"}
"""Of these, behind its beginning and beside its steps."""


class Outcome(Enum):
    """FAILED would fail again, of what was asked; BROKE might not, of how things were then; of STRUCK workers died.

    A step that BROKE left the gradients where they were; one that was STRUCK took them along with its worker.
    """

    DONE = "done"
    FAILED = "failed"
    BROKE = "broke"
    STRUCK = "struck"


class Repeat(Enum):
    """What is to be done for an operation of the past. CLEAR: the gradients that wait are dropped."""

    AGAIN = "again"
    CLEAR = "clear"


@dataclass(eq=False)
class Past:
    """An operation that was begun. outcome: None until it has ended, and where that is not known any more.

    taints: the next step would be a wrong one. added_at: monotonic.

    is_answered: its result is durable, or it has none. is_covered: by a snapshot, and the one after that.
    """

    seq_id: int
    kind: str
    place: Place
    num_bytes: int = 0
    outcome: Outcome | None = None
    taints: bool = False
    is_answered: bool = False
    is_covered: bool = False
    added_at: float = field(default_factory=time.monotonic)

    @property
    def is_needed(self) -> bool:
        return not (self.is_answered and self.is_covered)


class History:
    """release: called with the place of what is not needed any more."""

    def __init__(self, release: Callable[[Place], None]) -> None:
        self._release = release
        self._pasts: dict[Past, None] = {}
        self._num_steps = self._num_bytes = 0

    def add(self, past: Past) -> Past:
        """In the order of seq_ids."""
        past.is_covered |= past.kind not in KEPT
        self._pasts[past] = None
        if not past.is_covered:
            self._num_steps += past.kind == "optim_step"
            self._num_bytes += past.num_bytes
        self._let_go([past])
        return past

    def answered(self, past: Past) -> None:
        """Its result is durable."""
        past.is_answered = True
        self._let_go([past])

    def is_due(self, most_steps: float, most_bytes: float) -> bool:
        """Whether so much has come since the last snapshot was begun. Asked again: no, until there is more."""
        if self._num_steps < most_steps and self._num_bytes < most_bytes:
            return False
        self._num_steps = self._num_bytes = 0
        return True

    def is_older_than(self, seconds: float) -> bool:
        """Whether something that old would be needed to make the state again. Strikes against that are not."""
        needed = (past for past in self._pasts if not past.is_covered and past.kind != REBUILD_STRIKE)
        oldest = min((past.added_at for past in needed), default=math.inf)
        return oldest < time.monotonic() - seconds

    def cover(self, seq_id: int) -> None:
        """Nothing up to this one is needed to make the state again."""
        covered = [past for past in self._pasts if past.seq_id <= seq_id]
        for past in covered:
            past.is_covered = True
        self._let_go(covered)

    async def all_answered(self, seq_id: int) -> None:
        """Returns once the results of all up to this one are durable."""
        while any(not past.is_answered for past in self._pasts if past.seq_id <= seq_id):  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_SECONDS)

    def repeats(self, after: int, is_tainted: bool) -> Iterator[tuple[Past, Repeat]]:
        """What has ended behind a snapshot of seq_id `after`, as far as it changed the state. Raises OperationError.

        is_tainted: the snapshot's window.
        """
        for past in sorted(self._pasts, key=lambda past: past.seq_id):
            if past.seq_id <= after or (past.outcome is None and not past.is_answered):
                continue
            if past.outcome is None:
                raise OperationError(f"nobody knows any more how {past.kind} with seq_id {past.seq_id} ended", "server")
            is_done = past.outcome is Outcome.DONE
            if past.kind == "optim_step" and past.outcome is Outcome.BROKE and not is_tainted:
                continue
            if past.kind == "optim_step":
                clears = is_tainted or past.outcome is Outcome.STRUCK
                yield past, Repeat.CLEAR if clears else Repeat.AGAIN
                is_tainted = False
            elif past.kind in _REPEATED and is_done:
                yield past, Repeat.AGAIN
                is_tainted &= past.kind not in BEGINS_WINDOW
            is_tainted |= past.taints or (past.kind == "forward_backward" and not is_done)

    def close(self) -> None:
        """The run is over."""
        for past in self._pasts:
            past.is_covered = True
        self._let_go(list(self._pasts))

    def _let_go(self, pasts: list[Past]) -> None:
        for past in pasts:
            if not past.is_needed and past in self._pasts:
                del self._pasts[past]
                self._release(past.place)

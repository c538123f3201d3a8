"""Recovery of a run after a restart: what an earlier process left of it, and where the run continues.

Operations which that process had finished become the run's replay log; the others are queued again, in order.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...schemas.training import OptimStepRequest
from ..features.captured import uses_of
from ..files.wal import Place
from ..journal.futures import Encoding, Futures
from ..journal.journal import Header, Journal, Journaled
from ..journal.quarantine import MOST_STRIKES, STRIKE, STRIKES
from ..store import RunRecord
from .operations import CreateRun, Operation, read_again, read_operation
from .queued import GAP, Refused
from .replay_log import BEGINS_WINDOW, REFUSED, Outcome, Past
from .run_services import RunServices
from .snapshotting import RunState, Window

_READ_AT_ONCE = 64
_OUTCOMES: Mapping[Encoding, Outcome] = {"user_error": Outcome.FAILED, "server_error": Outcome.BROKE}


@dataclass(frozen=True)
class Earlier:
    """An operation that an earlier process accepted or refused; outcome: None if it has no result. feature_bytes: see
    Header.
    """

    kind: str
    place: Place
    refused: Refused | None = None
    outcome: Outcome | None = None
    feature_bytes: int | None = 0


@dataclass(frozen=True)
class Inherited:
    """The journal's entries of one run. operations: by seq_id."""

    operations: Mapping[int, Earlier]
    strikes: Sequence[Journaled] = ()

    @classmethod
    async def of(cls, entries: Sequence[Journaled], journal: Journal, futures: Futures) -> "Inherited":
        strikes = [one for one in entries if one.header.kind in STRIKES]
        operations: dict[int, Journaled] = {}
        for one in entries:
            if one.header.kind not in STRIKES:
                # An entry exists twice if a write failed half way and the client retried.
                if (known := operations.get(one.header.seq_id)) is not None:
                    journal.release(known.place)
                operations[one.header.seq_id] = one
        answers = await futures.earlier([one.header.request_id for one in operations.values()])
        found = {seq_id: _earlier(one, answers.get(one.header.request_id)) for seq_id, one in operations.items()}
        return cls(found, strikes)


@dataclass(frozen=True)
class Undone:
    """An operation to be run, or run again; num_strikes: crashes of workers that ran it."""

    earlier: Earlier
    content: Operation | Refused
    num_strikes: int


@dataclass
class Resumed:
    """The state from which a run continues.

    undone, refusals (with their reasons) and held are by seq_id. held: the uses of captured features that the next step
    will
    consume.
    """

    next_seq_id: int
    window: Window
    held: dict[int, Mapping[str, int]] = field(default_factory=dict)
    undone: Mapping[int, Undone] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)


class Resuming:
    def __init__(self, record: RunRecord, services: RunServices, state: RunState, inherited: Inherited) -> None:
        self._record = record
        self._services = services
        self._state = state
        self._found = inherited.operations
        self._strikes = inherited.strikes
        # Operations after the newest snapshot whose gradients are pending, by seq_id.
        self._waiting: dict[int, Earlier] = {}
        self._num_strikes = Counter(one.header.seq_id for one in self._strikes if one.header.kind == STRIKE)
        # Refusals do not count: they may be ahead of operations that have not arrived.
        ended = (seq_id for seq_id, one in self._found.items() if one.outcome is not None and one.refused is None)
        self._last_ended = max(ended, default=-1)

    async def resumed(self) -> Resumed:
        """Returns where the run continues.

        Raises:
            ValueError, OSError, RequestError: the run cannot continue; none of its operations has begun.
        """
        rebuild_strikes = [one for one in self._strikes if one.header.kind != STRIKE]
        first = await self._state.find_snapshots(self._found, rebuild_strikes)
        await self._begin()
        resumed = Resumed(first, self._state.first_window(), dict(self._state.held))
        for one in self._strikes:
            if one.header.kind == STRIKE and one.header.seq_id < first:
                self._services.journal.release(one.place)
            elif one.header.kind == STRIKE:
                self._state.history.add(
                    Past(one.header.seq_id, STRIKE, one.place, outcome=Outcome.FAILED, is_answered=True)
                )
        for seq_id, earlier in self._found.items():
            if seq_id < first:
                self._services.journal.release(earlier.place)
        while await self._pass(resumed):
            resumed.next_seq_id += 1
        contents = await self._contents(list(self._waiting.values()))
        resumed.held |= zip(self._waiting, map(uses_of, contents), strict=True)
        resumed.undone = await self._undone(resumed.next_seq_id)
        return resumed

    async def _begin(self) -> None:
        if self._state.has_snapshots:
            self._state.began_before(CreateRun())
        elif self._found[0].outcome is Outcome.DONE:
            created = await read_operation(self._services.journal, self._found[0].place)
            assert isinstance(created, CreateRun)
            self._state.began_before(created)

    async def _pass(self, resumed: Resumed) -> bool:
        """Adds the next operation to the replay log if the earlier process had finished it; else returns False."""
        seq_id, earlier = resumed.next_seq_id, self._found.get(resumed.next_seq_id)
        covered = self._state.covers(seq_id)
        if earlier is None:
            # Operations that changed no state leave the journal early, and their results expire.
            named = self._record.request_id(seq_id)
            is_past = covered or seq_id < self._last_ended or await self._services.futures.has_result(named)
            if is_past and not covered:
                self._refuse_damaged(seq_id)
            return is_past
        if earlier.outcome is None and not covered:
            return False
        outcome = Outcome.STRUCK if self._num_strikes[seq_id] >= MOST_STRIKES else earlier.outcome
        past = Past(seq_id, earlier.kind, earlier.place, outcome=outcome, is_answered=True)
        if self._record.role == "draft" and not covered:
            await self._follow_gradients(resumed, seq_id, replace(earlier, outcome=outcome))
        if earlier.refused is not None:
            past.kind, past.taints = REFUSED, earlier.refused.taints
            resumed.refusals[seq_id] = earlier.refused.reason
            resumed.window.refused(seq_id, earlier.refused)
        elif outcome is None:
            await self._services.futures.lose([self._header(earlier.kind, seq_id)])
        elif earlier.kind == "optim_step" or (earlier.kind in BEGINS_WINDOW and outcome is Outcome.DONE):
            resumed.window = Window()
        elif earlier.kind == "forward_backward" and outcome is not Outcome.DONE:
            resumed.window.taint(f"forward_backward with seq_id {seq_id} failed")
        self._state.history.add(past)
        return True

    async def _follow_gradients(self, resumed: Resumed, seq_id: int, earlier: Earlier) -> None:
        """Tracks the operations whose features are held until their gradients are used or dropped."""
        if await self._ends_gradients(earlier, resumed.window):
            resumed.held.clear()
            self._waiting.clear()
        elif earlier.kind == "forward_backward" and earlier.outcome is Outcome.DONE:
            self._waiting[seq_id] = earlier

    async def _ends_gradients(self, earlier: Earlier, window: Window) -> bool:
        """True if the operation used or cleared the pending gradients."""
        if earlier.kind in BEGINS_WINDOW:
            return earlier.outcome is Outcome.DONE
        if earlier.kind != "optim_step" or earlier.refused is not None:
            return False
        if window.tainted_by is None and earlier.outcome is Outcome.FAILED:
            # A request for an unsupported optimizer clears no gradients.
            asked = await self._content(earlier)
            return isinstance(asked, OptimStepRequest) and asked.optimizer_params is None
        return window.tainted_by is not None or earlier.outcome is not Outcome.BROKE

    def _refuse_damaged(self, seq_id: int) -> None:
        """Raises ValueError if the missing operation may have been in a damaged journal segment.

        Operations that changed no state also disappear from the journal, but only together with their whole segment.
        """
        before = max((one.place.segment for number, one in self._found.items() if number < seq_id), default=0)
        behind = max((one.place.segment for number, one in self._found.items() if number > seq_id), default=0)
        unreadable = self._services.journal.unreadable
        if lost_in := [segment for segment in unreadable if before <= segment <= behind]:
            raise ValueError(
                f"its operation {seq_id} may be in the damaged part of segment {lost_in[0]} of the journal"
            )

    async def _undone(self, first: int) -> Mapping[int, Undone]:
        """Returns the operations from this seq_id on, in order."""
        found = {seq_id: self._found[seq_id] for seq_id in sorted(self._found) if seq_id >= first}
        contents = await self._contents(list(found.values()))
        return {
            seq_id: Undone(earlier, content, self._num_strikes[seq_id])
            for (seq_id, earlier), content in zip(found.items(), contents, strict=True)
        }

    async def _contents(self, several: Sequence[Earlier]) -> list[Operation | Refused]:
        contents = []
        for begin in range(0, len(several), _READ_AT_ONCE):
            part = several[begin : begin + _READ_AT_ONCE]
            contents += await asyncio.gather(*(self._content(earlier) for earlier in part))
        return contents

    async def _content(self, earlier: Earlier) -> Operation | Refused:
        return earlier.refused or await read_again(self._services.journal, earlier.place, earlier.outcome)

    def _header(self, kind: str, seq_id: int) -> Header:
        record = self._record
        return Header(kind, record.tenant_id, record.run_id, seq_id, record.request_id(seq_id))


def _earlier(one: Journaled, answer: Encoding | None) -> Earlier:
    header = one.header
    if header.refused is not None:
        refused = Refused(header.kind, header.refused, taints=header.kind in ("forward_backward", GAP))
        return Earlier(header.kind, one.place, refused, Outcome.FAILED)
    outcome = None if answer is None else _OUTCOMES.get(answer, Outcome.DONE)
    return Earlier(header.kind, one.place, outcome=outcome, feature_bytes=header.feature_bytes)

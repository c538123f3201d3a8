"""Recovery of a run after a restart: what an earlier process left of it, and where the run continues.

Operations which that process had finished become the run's replay log; the others are queued again, in order.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...workers.scheduler.quarantine import MAX_STRIKES
from ..files.segment_log import RecordPosition
from ..journal.futures import Encoding, Futures
from ..journal.journal import EntryLocation, Journal, request_id_of
from ..journal.strikes import STRIKE, STRIKES
from ..operations.loading import CreateRun
from ..operations.operation import MISSING, REFUSED, Operation, Outcome, RefusedOperation, ReplayEntry
from ..operations.registry import TAINTING_KINDS, read_operation
from ..operations.training import ForwardBackward, OptimStep
from ..tenants.quotas import Reservation
from .rebuilder import Rebuilder
from .replay_log import ends_window, taints_window
from .run_state import OperationWindow, RunServices, RunState
from .snapshots import RunSnapshots

_READ_AT_ONCE = 64
_OUTCOMES: Mapping[Encoding, Outcome] = {"user_error": Outcome.FAILED, "server_error": Outcome.SERVER_FAILED}


@dataclass(frozen=True)
class EarlierOperation:
    """An operation that an earlier process accepted or refused.

    place: of its journal entry. outcome: None if it has no result. feature_bytes, digest: see Header.
    """

    kind: str
    place: RecordPosition
    refused: RefusedOperation | None = None
    outcome: Outcome | None = None
    feature_bytes: int | None = 0
    digest: str | None = None


@dataclass(frozen=True)
class JournaledRun:
    """The journal's entries of one run. operations: by seq_id."""

    operations: Mapping[int, EarlierOperation]
    strikes: Sequence[EntryLocation] = ()

    @classmethod
    async def of(cls, entries: Sequence[EntryLocation], journal: Journal, futures: Futures) -> "JournaledRun":
        strikes = [one for one in entries if one.header.kind in STRIKES]
        operations: dict[int, EntryLocation] = {}
        for one in entries:
            if one.header.kind not in STRIKES:
                # An entry exists twice if a write failed half way and the client retried.
                if (known := operations.get(one.header.seq_id)) is not None:
                    journal.release(known.place)
                operations[one.header.seq_id] = one
        answers = await futures.find_encodings([one.header.request_id for one in operations.values()])
        found = {seq_id: _earlier(one, answers.get(one.header.request_id)) for seq_id, one in operations.items()}
        return cls(found, strikes)


@dataclass
class RecoveredState:
    """The state from which a run continues.

    held: the uses of captured features that the next step will consume, by seq_id.
    unfinished: the operations to be run, or run again, each with the digest of its request. A client waits for those
        with a reservation.
    refusals: reasons by seq_id.
    """

    next_seq_id: int
    window: OperationWindow
    held: dict[int, Mapping[str, int]] = field(default_factory=dict)
    unfinished: Sequence[tuple[Operation, str | None]] = ()
    refusals: dict[int, str] = field(default_factory=dict)


class RunRecovery:
    def __init__(
        self,
        state: RunState,
        services: RunServices,
        snapshots: RunSnapshots,
        rebuilder: Rebuilder,
        journaled: JournaledRun,
    ) -> None:
        self._state = state
        self._services = services
        self._snapshots = snapshots
        self._rebuilder = rebuilder
        self._operations = journaled.operations
        self._strikes = journaled.strikes
        # Operations after the newest snapshot whose gradients are pending, by seq_id.
        self._pending: dict[int, EarlierOperation] = {}
        self._num_strikes = Counter(one.header.seq_id for one in self._strikes if one.header.kind == STRIKE)
        # Refusals do not count: they may be ahead of operations that have not arrived.
        ended = (seq_id for seq_id, one in self._operations.items() if one.outcome is not None and one.refused is None)
        self._last_ended = max(ended, default=-1)

    async def recover(self) -> RecoveredState:
        """Returns where the run continues.

        Raises:
            ValueError, OSError, RequestError: the run cannot continue; none of its operations has begun.
        """
        first = await self._snapshots.find(self._operations)
        self._rebuilder.restore_strikes([one for one in self._strikes if one.header.kind != STRIKE])
        if self._snapshots:
            self._state.recover(CreateRun())
        elif self._operations[0].outcome is Outcome.DONE:
            created = await self._read(self._operations[0])
            assert isinstance(created, CreateRun)
            self._state.recover(created)
        recovered = RecoveredState(first, self._snapshots.first_window(), dict(self._snapshots.held_features))
        for one in self._strikes:
            if one.header.kind == STRIKE and one.header.seq_id < first:
                self._services.journal.release(one.place)
            elif one.header.kind == STRIKE:
                self._state.log.add_strike(STRIKE, one.header.seq_id, one.place)
        for seq_id, earlier in self._operations.items():
            if seq_id < first:
                self._services.journal.release(earlier.place)
        while await self._add_next_to_log(recovered):
            recovered.next_seq_id += 1
        operations = await self._read_all(list(self._pending.values()))
        recovered.held |= zip(self._pending, (one.feature_uses for one in operations), strict=True)
        recovered.unfinished = await self._unfinished(recovered.next_seq_id)
        return recovered

    async def _add_next_to_log(self, recovered: RecoveredState) -> bool:
        """Adds the next operation to the replay log if the earlier process had finished it; else returns False."""
        seq_id, earlier = recovered.next_seq_id, self._operations.get(recovered.next_seq_id)
        covered = self._snapshots.covers(seq_id)
        if earlier is None:
            # Operations that changed no state leave the journal early, and their results expire.
            named = request_id_of(self._state.record.run_id, seq_id)
            is_past = covered or seq_id < self._last_ended or await self._services.futures.has_result(named)
            if is_past and not covered:
                self._refuse_damaged(seq_id)
            return is_past
        if earlier.outcome is None and not covered:
            return False
        outcome = Outcome.POISONED if self._num_strikes[seq_id] >= MAX_STRIKES else earlier.outcome
        entry = ReplayEntry(seq_id, earlier.kind, earlier.place, outcome=outcome, is_result_stored=True)
        if earlier.refused is not None:
            entry.kind, entry.taints = REFUSED, earlier.refused.taints
        if self._state.record.role == "draft" and not covered:
            await self._follow_gradients(recovered, entry, earlier)
        if earlier.refused is not None:
            recovered.refusals[seq_id] = earlier.refused.reason
            recovered.window.refused(seq_id, earlier.refused)
        elif outcome is None:
            await self._services.futures.fail_lost(
                [replace(self._state.header(earlier.kind, seq_id), digest=earlier.digest)]
            )
        elif ends_window(entry):
            recovered.window = OperationWindow()
        elif taints_window(entry):
            recovered.window.taint(f"{entry.kind} with seq_id {seq_id} failed")
        self._state.log.add(entry)
        return True

    async def _follow_gradients(self, recovered: RecoveredState, entry: ReplayEntry, earlier: EarlierOperation) -> None:
        """Tracks the operations whose features are held until their gradients are used or dropped."""
        ends = ends_window(entry)
        if entry.kind == OptimStep.kind and entry.outcome is Outcome.FAILED and recovered.window.tainted_by is None:
            # A request for an unsupported optimizer clears no gradients.
            step = await self._read(earlier)
            ends = isinstance(step, OptimStep) and step.request.optimizer_params is None
        if ends:
            recovered.held.clear()
            self._pending.clear()
        elif entry.kind == ForwardBackward.kind and entry.outcome is Outcome.DONE:
            self._pending[entry.seq_id] = earlier

    def _refuse_damaged(self, seq_id: int) -> None:
        """Raises ValueError if the missing operation may have been in a damaged journal segment.

        Operations that changed no state also disappear from the journal, but only together with their whole segment.
        """
        before = max((one.place.segment for number, one in self._operations.items() if number < seq_id), default=0)
        behind = max((one.place.segment for number, one in self._operations.items() if number > seq_id), default=0)
        unreadable = self._services.journal.unreadable
        if lost_in := [segment for segment in unreadable if before <= segment <= behind]:
            raise ValueError(
                f"its operation {seq_id} may be in the damaged part of segment {lost_in[0]} of the journal"
            )

    async def _unfinished(self, first: int) -> Sequence[tuple[Operation, str | None]]:
        """Returns the operations from this seq_id on, in order."""
        found = {seq_id: self._operations[seq_id] for seq_id in sorted(self._operations) if seq_id >= first}
        operations = await self._read_all(list(found.values()))
        for (seq_id, earlier), operation in zip(found.items(), operations, strict=True):
            self._restore(seq_id, earlier, operation)
        return [(operation, found[operation.seq_id].digest) for operation in operations]

    def _restore(self, seq_id: int, earlier: EarlierOperation, operation: Operation) -> None:
        """Restores what an operation had when it was journaled."""
        services, record = self._services, self._state.record
        operation.assign_seq_id(seq_id)
        operation.log_entry.place = earlier.place
        operation.work_context = services.telemetry.work_began(operation.kind, record.tenant_id, record.run_id)
        operation.strikes.num = self._num_strikes[seq_id]
        operation.failed_before = earlier.outcome is Outcome.SERVER_FAILED
        if earlier.outcome is None:
            operation.reservation = Reservation(services.quotas, record.tenant_id)
            num_bytes = earlier.feature_bytes or 0
            operation.reservation.add_features(
                num_bytes, services.context.features.reserve_again(record.tenant_id, num_bytes)
            )
        if operation.reservation is not None or operation.changes_state:
            services.context.features.restore_hold(record, seq_id, operation.feature_uses)

    async def _read_all(self, several: Sequence[EarlierOperation]) -> list[Operation]:
        operations = []
        for begin in range(0, len(several), _READ_AT_ONCE):
            part = several[begin : begin + _READ_AT_ONCE]
            operations += await asyncio.gather(*(self._read(earlier) for earlier in part))
        return operations

    async def _read(self, earlier: EarlierOperation) -> Operation:
        return earlier.refused or await read_operation(self._services.journal, earlier.place, earlier.outcome)


def _earlier(one: EntryLocation, answer: Encoding | None) -> EarlierOperation:
    header = one.header
    if header.refused is not None:
        refused = RefusedOperation(header.kind, header.refused, taints=header.kind in (*TAINTING_KINDS, MISSING))
        return EarlierOperation(header.kind, one.place, refused, Outcome.FAILED)
    outcome = None if answer is None else _OUTCOMES.get(answer, Outcome.DONE)
    feature_bytes, digest = header.feature_bytes, header.digest
    return EarlierOperation(header.kind, one.place, outcome=outcome, feature_bytes=feature_bytes, digest=digest)

"""Defines the operations of a run: what a client asked for, how it is performed, and what it does to the run's state.

A Run gives an operation its place in the queue and decides when it is performed, and what its failure means for others.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, ClassVar, Self

from pydantic import BaseModel

from ...schemas.errors import OperationError
from ...workers.protocol.work_context import WorkContext
from ...workers.scheduler.work import CallSize
from ..files.segment_log import RecordPosition
from ..http.bodies import Body
from ..journal.futures import Future, Result
from ..journal.journal import Header, request_id_of
from ..journal.strikes import Strikes
from ..store import OperationRecord, RunRecord
from ..tenants.quotas import Reservation
from .context import OperationContext

REFUSED = "refused"
"""Kind of an operation that was not accepted."""

MISSING = "an operation"
"""Kind of an operation that has not arrived."""

WEIGHT = "weight:sum"
"""Metric of a pass in a run's history: the weight of its data, by which summed losses are divided."""

_MAX_ERROR = 1000
"""Characters of an error that a run's history keeps."""


class Outcome(Enum):
    """The way an operation ended.

    FAILED: the request was at fault, and would fail again. SERVER_FAILED: the server was at fault, and a retry may
    succeed. POISONED: workers crashed running it. After a step that is SERVER_FAILED the gradients are still pending,
    tainted or not; a POISONED one took them along with its worker.
    """

    DONE = auto()
    FAILED = auto()
    SERVER_FAILED = auto()
    POISONED = auto()


@dataclass(eq=False)
class ReplayEntry:
    """An operation's entry in the run's replay log, which outlives the operation itself.

    place: of its entry in the journal, None until that is written.
    outcome: None until the operation has ended, or if it is no longer known.
    taints: the next step would be wrong without it.
    is_result_stored: the database has the place of its result, or it has none.
    is_covered: by the two newest snapshots, or it changed no state.
    added_at: when it was added to the log, monotonic.
    """

    seq_id: int
    kind: str
    place: RecordPosition | None
    num_bytes: int = 0
    outcome: Outcome | None = None
    taints: bool = False
    is_result_stored: bool = False
    is_covered: bool = False
    added_at: float = 0.0


class WaitClock:
    """Measures since when each operation of a run waits for the ranks alone, and not for earlier ones; monotonic times.

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
        """Returns when the operations before this one had ended. call: the one that sends it, or a part of it."""
        if call is None or call is not self._call:
            self._call, self._free_at = call, time.monotonic() if self._running - {seq_id} else self._ended_at
        self._running.add(seq_id)
        return self._free_at

    def end(self, seq_id: int) -> None:
        self._running.discard(seq_id)
        self._ended_at = time.monotonic()


@dataclass(eq=False)
class Operation(ABC):
    """An operation of a run, from its arrival to its end. The run, and its recovery after a restart, set the fields."""

    kind: ClassVar[str]
    """The name in the journal."""
    changes_state: ClassVar[bool] = False
    """The run's state cannot be rebuilt without it."""
    is_step: ClassVar[bool] = False
    """Ends a gradient window."""
    clears_gradients: ClassVar[bool] = False
    """Clears pending gradients, so failures before it do not taint the next step."""
    changes_record: ClassVar[bool] = False
    """Changes the run's stored record."""
    taints_if_failed: ClassVar[bool] = False
    """The next optimizer step would be wrong without it."""
    reports_begin: ClassVar[bool] = False
    """Calls mark_begun itself, when the workers receive it."""
    sets_target: ClassVar[bool] = False
    """Sets the target of a draft, or may."""
    stores_features: ClassVar[bool] = False
    """Stores features, for which room is reserved when it is accepted."""

    seq_id: int = field(init=False)
    log_entry: ReplayEntry = field(init=False)
    drawn: Mapping[str, int] = field(init=False, default_factory=dict)
    """Seeds drawn because the request had none."""
    loads_files: bool = field(init=False, default=False)
    """Loads a checkpoint's files, which are pinned until snapshots cover the load."""
    journaled: "asyncio.Future[RecordPosition]" = field(init=False)
    """Done as soon as its journal entry is written, whose place its log entry then has."""
    arrived_at: float = field(init=False)
    future: Future | None = field(init=False, default=None)
    """Absent if no client waits for a result: it was refused, or an earlier process answered it but lost its effect."""
    reservation: Reservation | None = field(init=False, default=None)
    """Absent if no client waits for a result, as for `future`."""
    strikes: Strikes = field(init=False)
    """Crashes of workers that ran it alone."""
    failed_before: bool = field(init=False, default=False)
    """An earlier process answered it with a failure of the server."""
    wait_clock: WaitClock | None = field(init=False, default=None)
    """The clock of its run, None if it is replayed."""
    ready_at: float = field(init=False, default=0.0)
    """When only the ranks were left to wait for (see WaitClock)."""
    begun_at: float | None = field(init=False, default=None)
    """When the workers first received it or a part of it; None before."""
    size_of_call: CallSize | None = field(init=False, default=None)
    """The size of the last call of the workers that held a part of it; None if unknown."""
    work_context: WorkContext = field(init=False, default_factory=WorkContext)
    """Names the operation in log lines, and has its span."""
    metrics: Mapping[str, float] = field(init=False, default_factory=dict)
    """The metrics of the result; empty if it has none."""
    step: int | None = field(init=False, default=None)
    """The number of the optimizer step that it took; None if it took none."""

    @classmethod
    def of(cls, request: Any, header: Header | None = None) -> Self:
        """Returns the operation that this request asks for; `header`: its journal header if it was read back."""
        return cls(request)  # pyright: ignore[reportCallIssue]  (a subclass's field)

    def assign_seq_id(self, seq_id: int) -> None:
        """Gives the operation its number in a run's queue."""
        self.seq_id, self.log_entry, self.arrived_at = seq_id, ReplayEntry(seq_id, self.kind, None), time.monotonic()
        self.strikes = Strikes(f"this {self.kind}")

    def mark_begun(self, size: CallSize | None = None) -> None:
        """Notes that the workers have received it, or a part of it, in a call of this size."""
        free_at = 0.0 if self.wait_clock is None else self.wait_clock.begin(self.seq_id, size)
        if self.begun_at is None:
            self.begun_at, self.ready_at = time.monotonic(), max(self.ready_at, free_at)
        self.size_of_call = size

    def ended(self, run_id: str, error: str | None) -> OperationRecord:
        """Returns what the run's history keeps of the operation, which has just ended."""
        if self.begun_at is None:
            self.mark_begun()
        assert self.begun_at is not None
        return OperationRecord(
            run_id,
            self.seq_id,
            self.kind,
            ended_at=time.time(),
            queued_seconds=self.begun_at - self.ready_at,
            busy_seconds=time.monotonic() - self.begun_at,
            num_tokens=self.num_tokens,
            step=self.step if error is None else None,
            error=error and error[:_MAX_ERROR],
            metrics={name: value for name, value in self.metrics.items() if math.isfinite(value)},
        )

    def release(self) -> None:
        if self.reservation is not None:
            self.reservation.release()

    @property
    def is_chained(self) -> bool:
        """True if it can be handed to the dispatch, which keeps a run's order, before the earlier operations ended.

        Its `perform` must then await nothing before it calls the dispatch: that is what keeps the order.
        """
        return False

    @property
    def num_tokens(self) -> int:
        """Returns the tokens to be trained on or scored."""
        return 0

    @property
    def feature_uses(self) -> Counter[str]:
        """Returns how often the step after the operation will use captured features, by reference.

        They are 0 for forward-only passes, which read features without consuming a use.
        """
        return Counter()

    def size(self, body: Body) -> int:
        """Returns the bytes that it holds in memory until it has ended."""
        return len(body.received)

    def header(self, run: RunRecord, body: Body) -> Header:
        """Returns what the journal keeps, in addition to the body, to read the operation again."""
        return Header(
            self.kind,
            run.tenant_id,
            run.run_id,
            self.seq_id,
            request_id_of(run.run_id, self.seq_id),
            body.content_type,
            body.content_encoding,
            self.drawn,
            feature_bytes=0 if self.reservation is None else self.reservation.feature_bytes,
            digest=body.digest,
        )

    def check(self, run: RunRecord) -> None:  # noqa: B027
        """Raises OperationError if a run of this role has no such operation; called before `perform`."""

    @abstractmethod
    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        """Performs the operation and returns its result.

        A repeated seq_id is a retry after a crash, which may have happened when everything but the response was done.

        Raises:
            OperationError: the operation failed.
            RequestError: access was denied.
        """

    async def replay(self, context: OperationContext, run: RunRecord) -> None:
        """Like `perform`, but while rebuilding a lost run: skips the access check, which passed the first time."""
        await self.perform(context, run)

    async def undo(  # noqa: B027
        self, context: OperationContext, run: RunRecord, error: Exception
    ) -> None:
        """Releases what is held for the operation, which failed and will not be retried."""


@dataclass(eq=False)
class RefusedOperation(Operation):
    """An operation that was not accepted: its seq_id counts as done.

    refused_kind: of the operation as it was sent. taints: it may have been part of the next optimizer step's batch.
    """

    kind = REFUSED
    changes_state = True
    refused_kind: str
    reason: str
    taints: bool

    def assign_seq_id(self, seq_id: int) -> None:
        super().assign_seq_id(seq_id)
        entry = self.log_entry
        entry.outcome, entry.taints, entry.is_result_stored = Outcome.FAILED, self.taints, True

    def header(self, run: RunRecord, body: Body) -> Header:
        return replace(super().header(run, body), kind=self.refused_kind, refused=self.reason)

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        raise OperationError(self.reason)


def json_result(response: BaseModel) -> Result:
    return Result(response.model_dump_json(exclude_none=True).encode())

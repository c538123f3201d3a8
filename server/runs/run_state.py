"""Holds what the parts of a live run share: its record, its replay log and its progress, and the server's services."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from sqlalchemy.exc import SQLAlchemyError

from ...schemas.schedules import NO_SCHEDULES
from ..config.server_config import ServerConfig
from ..journal.futures import Futures
from ..journal.journal import Header, Journal, request_id_of
from ..journal.restore_marker import RestoreMarker
from ..journal.snapshot_store import SnapshotStore
from ..operations.context import OperationContext
from ..operations.loading import CreateRun
from ..operations.operation import Operation, RefusedOperation, WaitClock
from ..store import RunRecord
from ..store.database.database_errors import OUTAGE_RETRY_SECONDS, outage_message
from ..telemetry.telemetry import Telemetry
from ..tenants.quotas import Quotas
from .replay_log import ReplayLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunServices:
    """The parts of the server that runs use; context: those that their operations use too."""

    config: ServerConfig
    context: OperationContext
    futures: Futures
    journal: Journal
    snapshot_store: SnapshotStore
    restore_marker: RestoreMarker
    quotas: Quotas
    telemetry: Telemetry


@dataclass(eq=False)
class OperationWindow:
    """The operations from one optimizer step to the next; tainted_by: why the step that ends it would be wrong."""

    tainted_by: str | None = None

    def taint(self, reason: str) -> None:
        self.tainted_by = self.tainted_by or reason

    def refused(self, seq_id: int, refused: RefusedOperation) -> None:
        if refused.taints:
            self.taint(f"{refused.refused_kind} with seq_id {seq_id} was refused ({refused.reason})")


class Phase(Enum):
    """The phase of a run. It starts NEW, is LIVE once created, and LOST from a worker's death to its rebuild."""

    NEW = auto()
    """The workers have not created the run yet."""
    LIVE = auto()
    """The workers have the run, as far as is known: that they died is noticed when they are next asked."""
    LOST = auto()
    """The workers lost the run: it must be rebuilt, or is being rebuilt."""
    OVER = auto()
    """The run has ended, could not be created, or could not be rebuilt."""


@dataclass(eq=False)
class RunState:
    """The state of a live run. Only its methods change the phase."""

    record: RunRecord
    log: ReplayLog
    wait_clock: WaitClock = field(default_factory=WaitClock)
    phase: Phase = Phase.NEW
    created: CreateRun | None = None
    """The operation that created the run, which a rebuild without a snapshot repeats; None in the phase NEW."""
    window: OperationWindow = field(default_factory=OperationWindow)
    """The window of the operations that begin next."""
    num_steps: int | None = None
    """Optimizer steps taken, as the optimizer counts them; None if that is not known before the next one."""
    unusable: str | None = None
    """The reason why the run is OVER."""
    has_ended: bool = False
    """True if the client, or its absence, ended the run."""
    outage: str | None = None
    """The reason why operations wait for the database; None if they do not."""
    has_stopped: bool = False
    """True if the server is stopping; the journal keeps everything for the next process."""

    @property
    def is_live(self) -> bool:
        return self.phase is Phase.LIVE

    @property
    def is_lost(self) -> bool:
        return self.phase is Phase.LOST

    def may_be_due(self, in_progress: Iterable[Operation]) -> bool:
        """True if something may have to be done after the optimizer step behind these operations."""
        if self.num_steps is None:
            return self.record.schedules != NO_SCHEDULES
        # Of the steps in progress some may fail, and some may have been counted.
        num_steps = sum(operation.is_step for operation in in_progress)
        return self.record.schedules.is_due_within(self.num_steps + 1, self.num_steps + num_steps + 1)

    def begin(self) -> None:
        """Notes that the workers have the run: it was created or rebuilt."""
        if self.phase is not Phase.OVER:
            self.phase = Phase.LIVE

    def lose(self) -> None:
        """Notes that the workers lost the run, if they had it."""
        if self.phase is Phase.LIVE:
            self.phase = Phase.LOST

    def recover(self, created: CreateRun) -> None:
        """Notes that an earlier process created the run, which no worker has now."""
        self.created, self.phase = created, Phase.LOST

    def fail(self, reason: str) -> None:
        """Notes that the run cannot continue, unless it is over already."""
        if self.phase is not Phase.OVER:
            self.phase, self.unusable = Phase.OVER, reason

    def end(self, reason: str) -> None:
        self.phase, self.unusable, self.has_ended = Phase.OVER, reason, True

    def header(self, kind: str, seq_id: int) -> Header:
        record = self.record
        return Header(kind, record.tenant_id, record.run_id, seq_id, request_id_of(record.run_id, seq_id))

    async def wait_out(self, outage: SQLAlchemyError) -> None:
        """Waits a little for the database, which could not be used."""
        reason = outage_message(outage)
        if reason != self.outage:
            logger.error("%s waits: %s", self.record.run_id, reason)
        self.outage = reason
        await asyncio.sleep(OUTAGE_RETRY_SECONDS)

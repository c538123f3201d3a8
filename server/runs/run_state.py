"""Holds what the parts of a live run share: its record, its replay log and its progress, and the server's services."""

import asyncio
import logging
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError

from ..config.server_config import ServerConfig
from ..journal.futures import Futures
from ..journal.journal import Header, Journal
from ..journal.restore_marker import RestoreMarker
from ..journal.snapshot_store import SnapshotStore
from ..operations.context import OperationContext
from ..operations.loading import CreateRun
from ..operations.operation import RefusedOperation, Turns
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


@dataclass(eq=False)
class RunState:
    """The state of a live run.

    turns: of its operations.
    created: how the run was created, None before that.
    is_loaded: true if the workers have the run, as far as is known: that they died is noticed when they are next asked.
    window: of the operations that begin next.
    num_steps: optimizer steps taken, as the optimizer counts them; None if that is not known before the next one.
    unusable: why the run is over, could not be created, or could not be rebuilt; None while it is usable.
    has_ended: true if the client, or its absence, ended the run.
    outage: why operations wait for the database, None if they do not.
    has_stopped: true if the server is stopping; the journal keeps everything for the next process.
    """

    record: RunRecord
    log: ReplayLog
    turns: Turns = field(default_factory=Turns)
    created: CreateRun | None = None
    is_loaded: bool = False
    window: OperationWindow = field(default_factory=OperationWindow)
    num_steps: int | None = None
    unusable: str | None = None
    has_ended: bool = False
    outage: str | None = None
    has_stopped: bool = False

    @property
    def is_lost(self) -> bool:
        """True if the workers lost this run and it must be rebuilt."""
        return self.created is not None and not self.is_loaded and self.unusable is None

    def header(self, kind: str, seq_id: int) -> Header:
        record = self.record
        return Header(kind, record.tenant_id, record.run_id, seq_id, record.request_id(seq_id))

    async def wait_out(self, outage: SQLAlchemyError) -> None:
        """Waits a little for the database, which could not be used."""
        reason = outage_message(outage)
        if reason != self.outage:
            logger.error("%s waits: %s", self.record.run_id, reason)
        self.outage = reason
        await asyncio.sleep(OUTAGE_RETRY_SECONDS)

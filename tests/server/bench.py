"""Runs a Run over a real journal and real futures, with operations that only record that they were performed."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from trainhouse.schemas.futures import SubmitResponse
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import Datum, ForwardBackwardRequest, OptimStepRequest
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.files.segment_log import RecordPosition
from trainhouse.server.http.bodies import UNLIMITED, Body, RunRequest
from trainhouse.server.journal.futures import Futures, Result
from trainhouse.server.journal.journal import EntryLocation, Header, Journal, read_journal, request_id_of
from trainhouse.server.journal.restore_marker import RestoreMarker
from trainhouse.server.journal.snapshot_store import RunSnapshot, SnapshotStore
from trainhouse.server.operations.features import Features
from trainhouse.server.operations.loading import CreateRun
from trainhouse.server.operations.operation import Operation, ReplayEntry
from trainhouse.server.operations.pinned_checkpoints import PinnedCheckpoints
from trainhouse.server.operations.registry import OPERATIONS, operation_of
from trainhouse.server.runs.recovery import JournaledRun
from trainhouse.server.runs.run import Run
from trainhouse.server.runs.run_state import RunServices
from trainhouse.server.store import DATABASE_NAME, RunRecord, SqliteStore, TenantRecord
from trainhouse.server.telemetry.telemetry import Telemetry
from trainhouse.server.tenants.quotas import QueuePosition, Quotas, Reservation
from trainhouse.server.tenants.sessions import Sessions
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.worker_config import DispatchConfig, ServedModel

RUN_ID = "session:train:0"
RECORD = RunRecord(RUN_ID, "session", "alice", "tiny", LoraConfig(rank=4, seed=1), 0.0, 0.0)
BODY = Body(b"as received", UNLIMITED)
FORWARD_BACKWARD = json.dumps(
    {"model_id": RUN_ID, "data": [{"model_input": [1], "loss_fn_inputs": {}}], "loss_fn": "cross_entropy"}
).encode()
CREATION = Body(b'{"session_id": "session", "model_seq_id": 0, "base_model": "tiny"}', UNLIMITED)


@dataclass
class RecordingOperations:
    """Records the seq_ids of operations when they begin and when they end. Is also the dispatch of its operations."""

    sessions: Sessions
    pinned_checkpoints: PinnedCheckpoints
    features: Features = field(default_factory=Features)
    begun: list[Any] = field(default_factory=list)
    performed: list[Any] = field(default_factory=list)
    failing: dict[int, Exception] = field(default_factory=dict)
    undone: list[int] = field(default_factory=list)
    failing_undo: dict[int, Exception] = field(default_factory=dict)
    may_proceed: asyncio.Event = field(default_factory=asyncio.Event)
    is_running: bool = True
    infos: dict = field(default_factory=dict)

    async def perform(self, run: RunRecord, operation: Any, seq_id: int) -> Result:
        self.begun.append(seq_id)
        await self.may_proceed.wait()
        self.performed.append(seq_id)
        await asyncio.sleep(0)
        if seq_id in self.failing:
            raise self.failing[seq_id]
        return Result(json.dumps({"seq_id": seq_id}).encode())

    async def replay(self, run: RunRecord, operation: Any, seq_id: int) -> None:
        await self.perform(run, operation, seq_id)

    async def stored_record(self, run: RunRecord) -> RunRecord:
        return run

    @property
    def dispatch(self) -> "RecordingOperations":
        return self

    def status(self, base_model: str, role: str) -> str:
        return f"busy: {base_model}"

    def is_up(self, base_model: str) -> bool:
        return self.is_running

    async def drop_run(self, run_id: str, *, keeps_suspicion: bool = False) -> None:
        self.performed.append("drop_run")

    async def create_in_workers(self, run: RunRecord, operation: CreateRun, *, is_rebuild: bool) -> None:
        self.performed.append("create")

    async def restore(self, run: RunRecord, snapshot: RunSnapshot) -> None:
        self.performed.append(f"restore {snapshot.directory.name}")

    async def snapshot_run(self, run_id: str, directory: Path) -> None:
        self.performed.append("snapshot")
        (directory / "state").write_bytes(b"state")

    async def clear_gradients(self, run: RunRecord, seq_id: int) -> None:
        self.performed.append("clear")

    async def drop(self, run: RunRecord) -> None:
        self.performed.append("drop")


async def _perform(self: Operation, context: RecordingOperations, run: RunRecord) -> Result:
    return await context.perform(run, self, self.seq_id)


async def _replay(self: Operation, context: RecordingOperations, run: RunRecord) -> None:
    await context.replay(run, self, self.seq_id)


async def _create(self: CreateRun, context: RecordingOperations, run: RunRecord) -> None:
    await context.create_in_workers(run, self, is_rebuild=True)


async def _undo(self: Operation, context: RecordingOperations, run: RunRecord, error: Exception) -> None:
    context.undone.append(self.seq_id)
    if self.seq_id in context.failing_undo:
        raise context.failing_undo[self.seq_id]


def record_operations(patch: pytest.MonkeyPatch) -> None:
    """Has operations record themselves in RecordingOperations instead of being performed."""
    for operation in OPERATIONS.values():
        patch.setattr(operation, "perform", _perform)
        patch.setattr(operation, "replay", _create if issubclass(operation, CreateRun) else _replay)
        patch.setattr(operation, "undo", _undo)


@dataclass
class Bench:
    run: Run
    services: RunServices
    operations: RecordingOperations
    futures: Futures
    journal_directory: Path
    snapshots: Path
    quotas: Quotas

    async def forward_backward(self, seq_id: int, forward_only: bool = False) -> str:
        datum = Datum(np.array([1], np.int32))
        request = ForwardBackwardRequest(RUN_ID, seq_id, (datum,), "cross_entropy", forward_only=forward_only)
        return (await self.submit(seq_id, request, Body(FORWARD_BACKWARD, UNLIMITED))).request_id

    async def submit(self, seq_id: int, asked: Operation | RunRequest, received: Body = BODY) -> SubmitResponse:
        operation = asked if isinstance(asked, Operation) else operation_of(asked)
        with Reservation(self.quotas, "alice") as reservation:
            reservation.claim(0, QueuePosition(is_alone=True))  # regardless of limits
            return await self.run.submit(seq_id, operation, received, reservation)

    async def optim_step(self, seq_id: int) -> str:
        request = OptimStepRequest(model_id=RUN_ID, seq_id=seq_id)
        body = Body(request.model_dump_json().encode(), UNLIMITED)
        return (await self.submit(seq_id, request, body)).request_id

    async def append_to_journal(self, kind: str, seq_id: int, body: bytes = CREATION.received) -> RecordPosition:
        """Appends a journal record as an earlier process would have."""
        header = Header(kind, "alice", RUN_ID, seq_id, request_id_of(self.run.record.run_id, seq_id))
        return await self.services.journal.append(header, body)

    async def restart(self) -> None:
        """Stops the run and recovers it from the journal, as a new process would."""
        queued = [*self.run.queue.waiting.values(), *self.run.queue.in_progress.values()]
        await self.run.stop()
        for operation in queued:
            if operation.future is not None:
                self.futures.forget(operation.future)
        await self.wait_until_stored()
        entries = [
            EntryLocation(RecordPosition(int(path.stem), entry.offset), entry.header)
            for path in sorted(self.journal_directory.glob("*.segment"))
            for entry in read_journal(path)
        ]
        self.run = Run(self.run.record, self.services)
        await self.run.resume(await JournaledRun.of(entries, self.services.journal, self.futures))

    @contextmanager
    def failing_journal(self) -> Iterator[None]:
        """Makes appends to the journal fail while the context is open: they have no directory for a new segment."""
        aside = self.journal_directory.with_name("aside")
        self.services.journal._segments._next_segment()
        self.journal_directory.rename(aside)
        yield
        aside.rename(self.journal_directory)

    @property
    def logged(self) -> list[ReplayEntry]:
        return list(self.run._state.log._entries)

    async def wait_until_stored(self) -> None:
        async with asyncio.timeout(10):
            while self.futures._unstored or self.futures._appending:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def result(self, seq_id: int, seconds: float = 10) -> dict:
        result = await self.futures.wait(request_id_of(self.run.record.run_id, seq_id), "alice", seconds)
        assert isinstance(result, Result), result
        return json.loads(result.body)


class MakeBench(Protocol):
    async def __call__(
        self,
        gap_seconds: float = 330.0,
        hold: bool = False,
        number: int = 0,
        quotas: Quotas | None = None,
        snapshot_steps: int = 1 << 30,
        snapshot_bytes: int = 1 << 40,
    ) -> Bench: ...


@asynccontextmanager
async def benches(tmp_path: Path) -> AsyncIterator[MakeBench]:
    async with AsyncExitStack() as stack:
        record_operations(stack.enter_context(pytest.MonkeyPatch.context()))
        store = SqliteStore(tmp_path / DATABASE_NAME)
        stack.callback(store.close)
        await store.tenants.ensure(TenantRecord("alice", "alice", 0.0))
        journal = Journal(tmp_path / "journal", 1 << 20)
        stack.push_async_callback(journal.close)
        futures = Futures(tmp_path / "results", store, 3600.0)
        await futures.open()
        snapshots = SnapshotStore(tmp_path / "snapshots", sync=False)
        stack.push_async_callback(futures.close)

        async def make(
            gap_seconds: float = 330.0,
            hold: bool = False,
            number: int = 0,
            quotas: Quotas | None = None,
            snapshot_steps: int = 1 << 30,
            snapshot_bytes: int = 1 << 40,
        ) -> Bench:
            pinned = PinnedCheckpoints(tmp_path / "loaded", sync=False)
            operations = RecordingOperations(Sessions(store, 300.0), pinned)
            if not hold:
                operations.may_proceed.set()
            config = ServerConfig.of(
                base_models=(ServedModel("tiny", "tiny"),),
                seq_gap_seconds=gap_seconds,
                snapshot_steps=snapshot_steps,
                snapshot_bytes=snapshot_bytes,
                queued_bytes=1 << 40,
            )
            quotas = quotas or Quotas(config)
            services = RunServices(
                config=config,
                context=operations,  # pyright: ignore[reportArgumentType]
                futures=futures,
                journal=journal,
                snapshot_store=snapshots,
                restore_marker=RestoreMarker(tmp_path),
                quotas=quotas,
                telemetry=Telemetry(WorkerDispatch(DispatchConfig(())), 60.0),
            )
            run = Run(replace(RECORD, run_id=f"session:train:{number}"), services)
            stack.push_async_callback(run.stop)
            own_snapshots = tmp_path / "snapshots" / f"session_train_{number}"
            bench = Bench(run, services, operations, futures, tmp_path / "journal", own_snapshots, quotas)
            await bench.submit(0, CreateRun(), CREATION)
            return bench

        yield make

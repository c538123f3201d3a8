"""Runs: a Run is one model being trained, which is one ordered queue of operations.

It accepts operations in any order and executes them in the order of their seq_ids, each once: it journals, orders,
awaits and resolves; it decodes nothing and knows neither ranks nor tensors. Forward, forward_backward and optim_step it
hands to the dispatch ahead, which keeps their order: the workers need not wait for it between two of them.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..schemas.checkpoints import LoadWeightsRequest
from ..schemas.errors import Category, OperationError, RequestError
from ..schemas.futures import Pending
from ..schemas.models import CreateModelRequest, LoraConfig, OptimizerConfig
from ..schemas.training import ForwardBackwardRequest, OptimStepRequest
from ..workers.dispatch import WorkerDispatch
from ..workers.verbs import RunInfo
from .auth import Tenant
from .bodies import Received
from .checkpoints import Checkpoints
from .futures import Future, Futures, Result
from .journal import Header, Journal
from .operations import CreateRun, Operation, Operations, is_chained, kind_of, size_of
from .quotas import Admission, Quotas, Standing
from .samplers import base_model_of, draw_seed, require_served
from .segments import Place
from .sessions import Sessions
from .store import RunRecord, Store, string_metadata

logger = logging.getLogger(__name__)

MOST_AHEAD = 10_000
"""How far a seq_id may be ahead of the one whose turn it is."""

_MOST_REFUSALS_KEPT = 1000
_MOST_UNDER_WAY = 64
_MOST_BYTES_UNDER_WAY = 64 << 20


@dataclass(frozen=True)
class Submitted:
    request_id: str
    seq_id: int


@dataclass(frozen=True)
class Refused:
    """An operation that was not accepted. taints: it may have been meant to be a part of the next optimizer step."""

    kind: str
    reason: str
    taints: bool


@dataclass(eq=False)
class _Slot:
    """A seq_id that has come. journaled: where it is in the journal, once it is there.

    future, admission: of an operation, not of a refusal.
    """

    content: Operation | Refused
    arrived_at: float
    journaled: asyncio.Future[Place]
    future: Future | None = None
    admission: Admission | None = None

    @property
    def num_bytes(self) -> int:
        return self.admission.num_bytes if self.admission else 0

    def release(self) -> None:
        if self.admission is not None:
            self.admission.release()


@dataclass(eq=False)
class _Window:
    """The operations from one optimizer step to the next. tainted_by: why that step would be a wrong one."""

    tainted_by: str | None = None

    def taint(self, reason: str) -> None:
        self.tainted_by = self.tainted_by or reason


@dataclass(frozen=True)
class RunServices:
    """What a run works with. status: of a base model, in words. seq_gap_seconds: what a missing seq_id may hold up."""

    futures: Futures
    journal: Journal
    operations: Operations
    sessions: Sessions
    quotas: Quotas
    status: Callable[[str], str | None]
    seq_gap_seconds: float


class Run:
    """`submit` and `refuse` come from requests, in any order; the queue works by itself until `end`."""

    def __init__(self, record: RunRecord, services: RunServices) -> None:
        self.record = record
        self.last_request_at = record.last_request_at
        self._services = services
        # By seq_id, in the order of arrival: those that wait, and those that were begun and are not answered.
        self._slots: dict[int, _Slot] = {}
        self._under_way: dict[int, _Slot] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._one_ended = asyncio.Event()
        self._next_seq_id = 0
        self._refusals: dict[int, str] = {}
        self._window = _Window()
        self._unusable: str | None = None
        self._working: asyncio.Task[None] | None = None
        self._gap_timer: asyncio.TimerHandle | None = None

    @property
    def info(self) -> RunInfo:
        """Raises RequestError 409 until the run has been created."""
        info = self._services.operations.infos.get(self.record.run_id)
        if info is None:
            raise RequestError(f"run {self.record.run_id} is not created yet: retrieve the result of that first", 409)
        return info

    async def submit(
        self,
        seq_id: int,
        operation: Operation,
        received: Received,
        admission: Admission,
        drawn: dict[str, int] | None = None,
    ) -> Submitted:
        """Returns once the operation is journaled. seq_id 0 asks for the next free one (but is CreateRun's own).

        A seq_id that came before answers as it did then, whatever its body says now. Raises RequestError: 400 where
        it was refused then, or is too far ahead; 503 where nothing can be journaled.
        """
        self.last_request_at = time.time()
        if seq_id == 0 and not isinstance(operation, CreateRun):
            seq_id = self._free_seq_id()
        if 0 <= seq_id < self._next_seq_id:
            return self._submitted_before(seq_id)
        if seq_id not in self._slots:
            self._check_acceptable(seq_id)
            self._accept(seq_id, operation, received, admission, drawn or {})
        slot = self._slots[seq_id]
        await self._wait_until_journaled(seq_id, slot)
        if isinstance(slot.content, Refused):
            raise _refused_before(seq_id, slot.content.reason)
        return Submitted(self.request_id(seq_id), seq_id)

    def standing(self, seq_id: int) -> Standing:
        """Of an operation that is to be submitted."""
        seq_id = seq_id or self._free_seq_id()
        if seq_id < self._next_seq_id or seq_id in self._slots:
            return Standing(self.record.run_id, needed=True)  # it came before, and needs only its answer
        missing = next(number for number in itertools.count(self._next_seq_id) if number not in self._slots)
        has_gap = len(self._slots) > missing - self._next_seq_id
        rests = missing == self._next_seq_id and not self._under_way
        ready = seq_id == missing
        # Clients may send what fills a gap only after what comes behind it was accepted.
        return Standing(
            self.record.run_id,
            ready,
            alone=ready and rests,
            needed=has_gap and (ready or rests),
            num_operations=len(self._slots),
            num_bytes=sum(slot.num_bytes for slot in self._slots.values()),
        )

    async def refuse(self, seq_id: int, refused: Refused) -> None:
        """Counts the seq_id as done, so that later ones need not wait for it. Known ones stay as they are."""
        if max(self._next_seq_id, 1) <= seq_id <= self._next_seq_id + MOST_AHEAD and seq_id not in self._slots:
            self._add_refusal(seq_id, refused)
            await self._wait_until_journaled(seq_id, self._slots[seq_id])

    def request_id(self, seq_id: int) -> str:
        return f"{self.record.run_id}:{seq_id}"

    async def end(self, reason: str) -> None:
        """Fails what has not begun, lets what has begun finish, and lets go of the run's state."""
        self._unusable = reason
        self._give_up_gaps(reason)
        self._one_ended.set()
        # Of what was handed on ahead only the first is surely being worked on.
        for task in list(self._tasks.values())[:0:-1]:
            task.cancel()
        while under_way := [task for task in (self._working, *self._tasks.values()) if task is not None]:
            await asyncio.wait(under_way)
        try:
            await self._services.operations.drop(self.record)
        except OperationError as error:
            logger.warning("run %s could not be dropped: %s", self.record.run_id, error)

    async def stop(self) -> None:
        """At shutdown: leaves everything as the journal has it."""
        if self._gap_timer is not None:
            self._gap_timer.cancel()
        if under_way := [task for task in (self._working, *self._tasks.values()) if task is not None]:
            for task in under_way:
                task.cancel()
            await asyncio.wait(under_way)
        for slot in self._slots.values():
            slot.release()

    # Accepting

    def _free_seq_id(self) -> int:
        return max(self._slots, default=self._next_seq_id - 1) + 1

    def _submitted_before(self, seq_id: int) -> Submitted:
        if seq_id in self._refusals:
            raise _refused_before(seq_id, self._refusals[seq_id])
        return Submitted(self.request_id(seq_id), seq_id)

    def _check_acceptable(self, seq_id: int) -> None:
        if seq_id < 0:
            raise RequestError(f"seq_id {seq_id} is negative: number operations 1, 2, 3 and so on")
        if self._unusable is not None:
            raise RequestError(self._unusable, 410)
        if seq_id > self._next_seq_id + MOST_AHEAD:
            raise RequestError(
                f"seq_id {seq_id} is more than {MOST_AHEAD} ahead of {self._next_seq_id}, whose turn it is: number "
                "operations 1, 2, 3 and so on"
            )

    def _accept(
        self, seq_id: int, operation: Operation, received: Received, admission: Admission, drawn: dict[str, int]
    ) -> None:
        header = Header(
            kind=kind_of(operation),
            tenant_id=self.record.tenant_id,
            run_id=self.record.run_id,
            seq_id=seq_id,
            request_id=self.request_id(seq_id),
            content_type=received.content_type,
            content_encoding=received.content_encoding,
            drawn=drawn,
        )
        slot = self._add(seq_id, operation, self._services.journal.append(header, received.body))
        size = size_of(operation, received)
        admission.keep(size.num_bytes, size.num_tokens)
        slot.admission = admission
        slot.future = self._services.futures.create(
            self.request_id(seq_id),
            self.record.tenant_id,
            partial(self._pending, seq_id),
            partial(self._release, slot.journaled),
        )

    def _add_refusal(self, seq_id: int, refused: Refused) -> None:
        header = Header(
            kind=refused.kind,
            tenant_id=self.record.tenant_id,
            run_id=self.record.run_id,
            seq_id=seq_id,
            request_id=self.request_id(seq_id),
            refused=refused.reason,
        )
        self._add(seq_id, refused, self._services.journal.append(header))

    def _add(self, seq_id: int, content: Operation | Refused, journaled: "asyncio.Future[Place]") -> _Slot:
        slot = _Slot(content, time.monotonic(), journaled)
        self._slots[seq_id] = slot
        self._go_on()
        return slot

    async def _wait_until_journaled(self, seq_id: int, slot: _Slot) -> None:
        """Raises RequestError; then the operation was not accepted, and the next try with its seq_id is the first."""
        try:
            await asyncio.shield(slot.journaled)
        except RequestError:
            if self._slots.get(seq_id) is slot:
                del self._slots[seq_id]
                slot.release()
                if slot.future is not None:
                    self._services.futures.forget(slot.future)
            raise

    def _release(self, journaled: "asyncio.Future[Place]") -> None:
        self._services.journal.release(journaled.result())

    # Executing

    def _go_on(self) -> None:
        """To be called whenever the next operation may have come."""
        if self._working is None and self._next_seq_id in self._slots:
            self._working = asyncio.create_task(self._work())
        self._watch_gap()

    async def _work(self) -> None:
        """Begins what is there, in order, up to the first gap."""
        try:
            while (slot := self._slots.get(self._next_seq_id)) is not None:
                await self._wait_until_journaled(self._next_seq_id, slot)
                while not self._may_begin(slot):
                    self._one_ended.clear()
                    await self._one_ended.wait()
                self._begin(self._next_seq_id, slot)
                del self._slots[self._next_seq_id]
                self._next_seq_id += 1
        except RequestError as error:
            logger.error("%s: %s", self.record.run_id, error)
        finally:
            self._working = None
        self._go_on()

    def _may_begin(self, slot: _Slot) -> bool:
        """Beside what is under way; what is not chained begins and ends alone."""
        under_way = self._under_way.values()
        if isinstance(slot.content, Refused) or not under_way or self._unusable is not None:
            return True
        chained = is_chained(slot.content) and _is_chained_slot(next(iter(under_way)))
        num_bytes = slot.num_bytes + sum(other.num_bytes for other in under_way)
        return chained and len(under_way) < _MOST_UNDER_WAY and num_bytes <= _MOST_BYTES_UNDER_WAY

    def _begin(self, seq_id: int, slot: _Slot) -> None:
        """Tasks take their first steps in the order in which they were made, so the dispatch gets them in order."""
        self._services.quotas.moves(self.record.tenant_id, self.record.run_id)
        if isinstance(slot.content, Refused):
            self._remember_refusal(seq_id, slot.content)
            self._release(slot.journaled)
            return
        window = self._window
        if isinstance(slot.content, OptimStepRequest):
            self._window = _Window()
        self._under_way[seq_id] = slot
        self._tasks[seq_id] = asyncio.create_task(self._take_turn(seq_id, slot, window))
        # A task that is cancelled before its first step ends nothing by itself.
        self._tasks[seq_id].add_done_callback(lambda _: self._end_turn(seq_id))

    async def _take_turn(self, seq_id: int, slot: _Slot, window: _Window) -> None:
        operation, future = slot.content, slot.future
        assert future is not None and not isinstance(operation, Refused)
        try:
            result = await self._perform(operation, window)
        except OperationError as error:
            self._fail(seq_id, operation, future, window, error.message, error.category)
        except RequestError as error:
            self._fail(seq_id, operation, future, window, error.message, "user")
        except Exception:
            logger.exception("%s failed", future.request_id)
            message = f"internal error in {kind_of(operation)} {future.request_id}: the server's log has it"
            self._fail(seq_id, operation, future, window, message, "server")
        else:
            self._services.futures.resolve(future, result)
        finally:
            self._end_turn(seq_id)
        self._services.sessions.heard_of(self.record.session_id)

    def _end_turn(self, seq_id: int) -> None:
        """Also of one that was cancelled. Again: no-op."""
        slot = self._under_way.pop(seq_id, None)
        if slot is None:
            return
        del self._tasks[seq_id]
        if self._unusable is not None and slot.future is not None:
            self._services.futures.fail(slot.future, self._unusable, "user")
        slot.release()
        self._one_ended.set()

    async def _perform(self, operation: Operation, window: _Window) -> Result:
        if self._unusable is not None:
            raise OperationError(self._unusable)
        if isinstance(operation, OptimStepRequest):
            return await self._perform_step(operation, window)
        result = await self._services.operations.perform(self.record, operation)
        if isinstance(operation, LoadWeightsRequest):
            self._window = _Window()
        return result

    async def _perform_step(self, operation: OptimStepRequest, window: _Window) -> Result:
        """A step over a part of its batch would be a wrong step.

        Where a part fails only after the step was handed on, it is the worker that refuses the step and clears.
        """
        if window.tainted_by is not None:
            await self._services.operations.clear_gradients(self.record)
            raise _incomplete(window.tainted_by)
        try:
            return await self._services.operations.perform(self.record, operation)
        except OperationError:
            if window.tainted_by is not None:
                raise _incomplete(window.tainted_by) from None
            raise

    def _fail(
        self, seq_id: int, operation: Operation, future: Future, window: _Window, message: str, category: Category
    ) -> None:
        if isinstance(operation, CreateRun):
            self._unusable = f"run {self.record.run_id} could not be created: {message}"
        if isinstance(operation, ForwardBackwardRequest) and not operation.forward_only:
            window.taint(f"forward_backward with seq_id {seq_id} failed ({message})")
        self._services.futures.fail(future, message, category)

    def _remember_refusal(self, seq_id: int, refused: Refused) -> None:
        if refused.taints:
            self._window.taint(f"{refused.kind} with seq_id {seq_id} was refused ({refused.reason})")
        self._refusals[seq_id] = refused.reason
        if len(self._refusals) > _MOST_REFUSALS_KEPT:
            del self._refusals[next(iter(self._refusals))]

    # Waiting

    def _pending(self, seq_id: int) -> Pending:
        if seq_id > self._next_seq_id and self._next_seq_id not in self._slots:
            return self._pending_behind_gap()
        earlier = [other for other in (*self._under_way, *self._slots) if other < seq_id]
        if not earlier:
            return Pending(queue_state_reason=self._services.status(self.record.base_model))
        are = "operations of this run come" if len(earlier) > 1 else "operation of this run comes"
        return Pending(queue_state_reason=f"{len(earlier)} {are} first")

    def _pending_behind_gap(self) -> Pending:
        seconds = max(0.0, self._gap_ends_at() - time.monotonic())
        put_off = self._services.quotas.pending(self.record.tenant_id)
        reason = f"waiting for the operation with seq_id {self._next_seq_id}, which has not arrived"
        if put_off is not None:
            reason = f"{reason}: requests of yours are put off ({put_off.queue_state_reason})"
        return Pending(
            queue_state=put_off.queue_state if put_off else "paused_capacity",
            queue_state_reason=f"{reason}; it counts as refused in {seconds:.0f} s",
        )

    def _watch_gap(self) -> None:
        if self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None
        if self._slots and self._next_seq_id not in self._slots:
            delay = max(0.0, self._gap_ends_at() - time.monotonic())
            reason = f"it did not arrive within {self._services.seq_gap_seconds:g} s"
            self._gap_timer = asyncio.get_running_loop().call_later(delay, self._give_up_gap, reason)

    def _gap_ends_at(self) -> float:
        """Monotonic time; counted from the arrival of the first operation that it holds up."""
        return next(iter(self._slots.values())).arrived_at + self._services.seq_gap_seconds

    def _give_up_gap(self, reason: str) -> None:
        """Up to the first operation that is there."""
        first = min(self._slots)
        logger.warning("%s: seq_id %d to %d given up: %s", self.record.run_id, self._next_seq_id, first - 1, reason)
        for seq_id in range(self._next_seq_id, first):
            self._add_refusal(seq_id, Refused("an operation", reason, taints=True))

    def _give_up_gaps(self, reason: str) -> None:
        for seq_id in range(self._next_seq_id, max(self._slots, default=0)):
            if seq_id not in self._slots:
                self._add_refusal(seq_id, Refused("an operation", reason, taints=True))


def _is_chained_slot(slot: _Slot) -> bool:
    return not isinstance(slot.content, Refused) and is_chained(slot.content)


def _incomplete(reason: str) -> OperationError:
    return OperationError(
        f"optim_step was not taken: {reason}. The gradients accumulated since the last step were cleared: repeat the "
        "whole batch, then optim_step"
    )


def _refused_before(seq_id: int, reason: str) -> RequestError:
    return RequestError(f"seq_id {seq_id} was refused before ({reason}): send the operation with the next seq_id")


class Runs:
    """The live runs. A run lives from its creation until its session ends or the server stops."""

    def __init__(
        self,
        store: Store,
        dispatch: WorkerDispatch,
        checkpoints: Checkpoints,
        services: RunServices,
        max_lora_rank: int,
    ) -> None:
        self._store = store
        self._dispatch = dispatch
        self._checkpoints = checkpoints
        self._services = services
        self._max_lora_rank = max_lora_rank
        self._runs: dict[str, Run] = {}
        self._ending: dict[asyncio.Task[None], Run] = {}
        self._saved_at = time.time()

    async def create(
        self, tenant: Tenant, request: CreateModelRequest, received: Received, admission: Admission
    ) -> Submitted:
        """The same session and model_seq_id answer the same. Raises RequestError."""
        _check_optimizer(request.optimizer_config)
        require_served(self._dispatch, request.base_model)
        lora = request.lora_config or LoraConfig()
        if lora.rank > self._max_lora_rank:
            raise RequestError(
                f"rank {lora.rank} exceeds max_lora_rank {self._max_lora_rank}: lower the rank or start the server "
                f"with --max-lora-rank {lora.rank}"
            )
        await self._services.sessions.require_open(tenant, request.session_id)
        drawn = {} if lora.seed is not None else {"lora_seed": draw_seed()}
        lora = lora.model_copy(update={"seed": drawn.get("lora_seed", lora.seed)})
        record = _record(tenant, request.session_id, request.model_seq_id, request.base_model, lora, request)
        return await self._create(record, CreateRun(), received, admission, drawn)

    async def create_from_checkpoint(
        self, tenant: Tenant, request: LoadWeightsRequest, received: Received, admission: Admission
    ) -> Submitted:
        """As `create`, with the checkpoint's base model and adapter shape, and its weights. Raises RequestError."""
        if request.session_id is None or request.model_seq_id is None:
            raise RequestError(
                "load_weights needs model_id (and seq_id) of a live model, or session_id and model_seq_id of a new one"
            )
        _check_optimizer(request.optimizer_config or OptimizerConfig())
        await self._services.sessions.require_open(tenant, request.session_id)
        checkpoint = await self._checkpoints.resolve(tenant, request.path, request.weights_access_token)
        base_model = base_model_of(checkpoint, request.base_model)
        require_served(self._dispatch, base_model)
        record = _record(tenant, request.session_id, request.model_seq_id, base_model, checkpoint.lora, request)
        return await self._create(record, CreateRun(checkpoint, request.optimizer), received, admission, {})

    async def get(self, tenant: Tenant, run_id: str) -> Run:
        """A live run. Raises RequestError 404, also for another tenant's, and 410 when it is not live any more."""
        run = self._runs.get(run_id)
        if run is not None and run.record.tenant_id == tenant.id:
            self._services.sessions.heard_of(run.record.session_id)
            return run
        record = None if run is not None else await self._store.get_run(run_id)
        if record is not None and record.tenant_id == tenant.id:
            raise _not_live(run_id)
        raise RequestError(f"there is no model {run_id}: create one with create_model", 404)

    async def end_session(self, session_id: str) -> None:
        ended = [run for run in self._runs.values() if run.record.session_id == session_id]
        for run in ended:
            del self._runs[run.record.run_id]
        for run in ended:
            reason = f"session {session_id} of run {run.record.run_id} has ended: create a new one"
            # Not awaited: an operation under way may take long.
            ending = asyncio.create_task(run.end(reason))
            self._ending[ending] = run
            ending.add_done_callback(self._ending.pop)

    async def save_request_times(self) -> None:
        """For those who list runs."""
        saved_at, self._saved_at = self._saved_at, time.time()
        times = {run_id: run.last_request_at for run_id, run in self._runs.items() if run.last_request_at >= saved_at}
        if times:
            await self._store.touch_runs(times)

    async def close(self) -> None:
        for ending in self._ending:
            ending.cancel()
        await asyncio.gather(*(run.stop() for run in (*self._runs.values(), *self._ending.values())))

    def num_live(self, tenant_id: str) -> int:
        return sum(run.record.tenant_id == tenant_id for run in self._runs.values())

    async def _create(
        self,
        record: RunRecord,
        operation: CreateRun,
        received: Received,
        admission: Admission,
        drawn: dict[str, int],
    ) -> Submitted:
        if record.run_id not in self._runs:
            if await self._store.get_run(record.run_id) is not None:
                raise _not_live(record.run_id)
            self._services.quotas.check_runs(record.tenant_id, self.num_live(record.tenant_id))
            self._runs.setdefault(record.run_id, Run(record, self._services))
        return await self._runs[record.run_id].submit(0, operation, received, admission, drawn)


def _not_live(run_id: str) -> RequestError:
    return RequestError(
        f"run {run_id} is not live: its session has ended, or the server was restarted since; create a new model from "
        "its last checkpoint (create_training_client_from_state)",
        410,
    )


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if optimizer.type != "adamw":
        raise RequestError(f"optimizer {optimizer.type!r} is not supported: use adamw, the default")


def _record(
    tenant: Tenant,
    session_id: str,
    model_seq_id: int,
    base_model: str,
    lora: LoraConfig,
    request: CreateModelRequest | LoadWeightsRequest,
) -> RunRecord:
    now = time.time()
    return RunRecord(
        run_id=f"{session_id}:train:{model_seq_id}",
        session_id=session_id,
        tenant_id=tenant.id,
        base_model=base_model,
        lora=lora,
        created_at=now,
        last_request_at=now,
        user_metadata=string_metadata(request.user_metadata),
    )

"""Runs: a Run is one model being trained, which is one ordered queue of operations.

It accepts operations in any order and executes them in the order of their seq_ids, each once: it journals, orders,
awaits and resolves; it decodes nothing and knows neither ranks nor tensors.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
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
from .operations import CreateRun, Operation, Operations, kind_of
from .samplers import base_model_of, draw_seed, require_served
from .segments import Place
from .sessions import Sessions
from .store import RunRecord, Store, string_metadata

logger = logging.getLogger(__name__)

MOST_AHEAD = 10_000
"""How far a seq_id may be ahead of the one whose turn it is."""

_MOST_REFUSALS_KEPT = 1000


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
    """A seq_id whose turn has not passed. journaled: where it is in the journal, once it is there."""

    content: Operation | Refused
    arrived_at: float
    journaled: asyncio.Task[Place]
    future: Future | None = None


@dataclass(frozen=True)
class RunServices:
    """What a run works with. status: of a base model, in words. seq_gap_seconds: what a missing seq_id may hold up."""

    futures: Futures
    journal: Journal
    operations: Operations
    sessions: Sessions
    status: Callable[[str], str | None]
    seq_gap_seconds: float


class Run:
    """`submit` and `refuse` come from requests, in any order; the queue works by itself until `end`."""

    def __init__(self, record: RunRecord, services: RunServices) -> None:
        self.record = record
        self.last_request_at = record.last_request_at
        self._services = services
        # By seq_id, in the order of arrival.
        self._slots: dict[int, _Slot] = {}
        self._next_seq_id = 0
        self._refusals: dict[int, str] = {}
        self._tainted_by: str | None = None
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
        self, seq_id: int, operation: Operation, received: Received, drawn: dict[str, int] | None = None
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
            self._accept(seq_id, operation, received, drawn or {})
        slot = self._slots[seq_id]
        await self._wait_until_journaled(seq_id, slot)
        if isinstance(slot.content, Refused):
            raise _refused_before(seq_id, slot.content.reason)
        return Submitted(self.request_id(seq_id), seq_id)

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
        while self._working is not None:
            await asyncio.wait({self._working})
        try:
            await self._services.operations.drop(self.record)
        except OperationError as error:
            logger.warning("run %s could not be dropped: %s", self.record.run_id, error)

    async def stop(self) -> None:
        """At shutdown: leaves everything as the journal has it."""
        if self._gap_timer is not None:
            self._gap_timer.cancel()
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})

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

    def _accept(self, seq_id: int, operation: Operation, received: Received, drawn: dict[str, int]) -> None:
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

    def _add(self, seq_id: int, content: Operation | Refused, journaling: Coroutine[None, None, Place]) -> _Slot:
        slot = _Slot(content, time.monotonic(), asyncio.create_task(journaling))
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
                if slot.future is not None:
                    self._services.futures.forget(slot.future)
            raise

    def _release(self, journaled: asyncio.Task[Place]) -> None:
        self._services.journal.release(journaled.result())

    # Executing

    def _go_on(self) -> None:
        """To be called whenever the next operation may have come."""
        if self._working is None and self._next_seq_id in self._slots:
            self._working = asyncio.create_task(self._work())
        self._watch_gap()

    async def _work(self) -> None:
        """Executes what is there, in order, up to the first gap."""
        try:
            while (slot := self._slots.get(self._next_seq_id)) is not None:
                await self._wait_until_journaled(self._next_seq_id, slot)
                await self._take_turn(self._next_seq_id, slot)
                del self._slots[self._next_seq_id]
                self._next_seq_id += 1
        except RequestError as error:
            logger.error("%s: %s", self.record.run_id, error)
        finally:
            self._working = None
        self._go_on()

    async def _take_turn(self, seq_id: int, slot: _Slot) -> None:
        if isinstance(slot.content, Refused):
            self._remember_refusal(seq_id, slot.content)
            self._release(slot.journaled)
            return
        assert slot.future is not None
        try:
            result = await self._perform(slot.content)
        except OperationError as error:
            self._fail(seq_id, slot.content, slot.future, error.message, error.category)
        except RequestError as error:
            self._fail(seq_id, slot.content, slot.future, error.message, "user")
        except Exception:
            logger.exception("%s failed", slot.future.request_id)
            message = f"internal error in {kind_of(slot.content)} {slot.future.request_id}: the server's log has it"
            self._fail(seq_id, slot.content, slot.future, message, "server")
        else:
            self._services.futures.resolve(slot.future, result)
        self._services.sessions.heard_of(self.record.session_id)

    async def _perform(self, operation: Operation) -> Result:
        if self._unusable is not None:
            raise OperationError(self._unusable)
        if isinstance(operation, OptimStepRequest) and self._tainted_by is not None:
            await self._refuse_step()
        result = await self._services.operations.perform(self.record, operation)
        if isinstance(operation, LoadWeightsRequest):
            self._tainted_by = None
        return result

    async def _refuse_step(self) -> None:
        """A step over a part of its batch would be a wrong step."""
        reason, self._tainted_by = self._tainted_by, None
        await self._services.operations.clear_gradients(self.record)
        raise OperationError(
            f"optim_step was not taken: {reason}. The gradients accumulated since the last step were cleared: repeat "
            "the whole batch, then optim_step"
        )

    def _fail(self, seq_id: int, operation: Operation, future: Future, message: str, category: Category) -> None:
        if isinstance(operation, CreateRun):
            self._unusable = f"run {self.record.run_id} could not be created: {message}"
        if isinstance(operation, ForwardBackwardRequest) and not operation.forward_only:
            self._taint(f"forward_backward with seq_id {seq_id} failed ({message})")
        self._services.futures.fail(future, message, category)

    def _taint(self, reason: str) -> None:
        self._tainted_by = self._tainted_by or reason

    def _remember_refusal(self, seq_id: int, refused: Refused) -> None:
        if refused.taints:
            self._taint(f"{refused.kind} with seq_id {seq_id} was refused ({refused.reason})")
        self._refusals[seq_id] = refused.reason
        if len(self._refusals) > _MOST_REFUSALS_KEPT:
            del self._refusals[next(iter(self._refusals))]

    # Waiting

    def _pending(self, seq_id: int) -> Pending:
        if self._next_seq_id not in self._slots and seq_id > self._next_seq_id:
            seconds = max(0.0, self._gap_ends_at() - time.monotonic())
            return Pending(
                queue_state="paused_capacity",
                queue_state_reason=f"waiting for the operation with seq_id {self._next_seq_id}, which has not arrived; "
                f"it counts as refused in {seconds:.0f} s",
            )
        if seq_id > self._next_seq_id:
            return Pending(queue_state_reason=f"{seq_id - self._next_seq_id} operations of this run come first")
        return Pending(queue_state_reason=self._services.status(self.record.base_model))

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
        self._ending: set[asyncio.Task[None]] = set()
        self._saved_at = time.time()

    async def create(self, tenant: Tenant, request: CreateModelRequest, received: Received) -> Submitted:
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
        return await self._create(record, CreateRun(), received, drawn)

    async def create_from_checkpoint(
        self, tenant: Tenant, request: LoadWeightsRequest, received: Received
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
        return await self._create(record, CreateRun(checkpoint, request.optimizer), received, {})

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
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def save_request_times(self) -> None:
        """For those who list runs."""
        saved_at, self._saved_at = self._saved_at, time.time()
        times = {run_id: run.last_request_at for run_id, run in self._runs.items() if run.last_request_at >= saved_at}
        if times:
            await self._store.touch_runs(times)

    async def close(self) -> None:
        for ending in self._ending:
            ending.cancel()
        await asyncio.gather(*(run.stop() for run in self._runs.values()))

    async def _create(
        self, record: RunRecord, operation: CreateRun, received: Received, drawn: dict[str, int]
    ) -> Submitted:
        if record.run_id not in self._runs:
            if await self._store.get_run(record.run_id) is not None:
                raise _not_live(record.run_id)
            self._runs.setdefault(record.run_id, Run(record, self._services))
        return await self._runs[record.run_id].submit(0, operation, received, drawn)


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

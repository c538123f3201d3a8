"""Schedules the work of the ranks that hold one base model, and restarts them when they die.

A group makes one call to its ranks at a time, so that all of them see work in the same order.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from ...schemas.errors import OperationError
from ...schemas.sampling import SampleResponse
from ...schemas.training import ForwardBackwardRequest
from ..planner.footprint import gigabytes, loaded_bytes
from ..pools.base import PlacementError, Pool, WorkerDied, WorkerError
from ..protocol.calls import Failure, ModelInfo, OptimizerStep, Pass, SampleJob, SliceResult, WorkerLost
from ..protocol.worker_config import WorkerConfig
from .backoff import RestartBackoff
from .cohorts import Cohort, Cohorts, OnProgress, SamplingWork
from .device_sharing import DeviceScheduler
from .fair_queue import PassLimits
from .loading import failure_reason, load
from .pending_snapshots import PendingSnapshots
from .quarantine import SUSPECT_SHRINK_FACTOR, Suspects
from .queue import GroupQueue, OperationChunk
from .ranks import Ranks
from .time_sharing import TimeShares
from .timeouts import CallTimeouts
from .work import Item, PassWorkItem, WorkerCall, WorkItem

logger = logging.getLogger(__name__)

_KINDS = ("training", "verbs", "snapshots", "sampling")

# Lengths of the first slices after a pause, as fractions of a slice.
_FIRST_SLICES = (1 / 16, 1 / 4)

# Pause before the next attempt to place the ranks. Nothing died, so there is no backoff.
_PLACE_SECONDS = 2.0

# Verbs that can run while the group is offloaded.
_ANYWHERE = ("memory", "drop_run", "drop_adapter")

# Verbs after which a run has no gradients.
_CLEARING = ("create_run", "load_run", "set_vocabulary", "clear_gradients", "drop_run")


class RankGroup:
    """Runs the work given to `submit` and `sample` in its scheduler loop (the lane), until `close`.

    name: for messages.
    info: the loaded model.
    num_deaths: deaths of its workers so far.
    restarting: true from a death until the new workers are ready.
    """

    info: ModelInfo

    def __init__(
        self,
        config: WorkerConfig,
        new_pool: Callable[[WorkerConfig], Pool],
        limits: PassLimits,
        slice_milliseconds: float,
        name: str | None = None,
        device_turns: DeviceScheduler | None = None,
        idle_seconds: float | None = None,
        suspect_jobs: Suspects | None = None,
    ) -> None:
        """Builds the group; `start` loads it.

        Args:
            name: the model's served name unless given.
            device_turns: None if the group does not share its devices by turns.
            idle_seconds: idle time after which it is offloaded from its devices; None means never.
            suspect_jobs: shared by groups that may receive each other's sampling jobs; None means private.
        """
        self.name = name or config.model.name
        self.num_deaths = 0
        self.restarting = False
        self._placement_error: PlacementError | None = None
        self._config = config
        self._new_pool = new_pool
        self._limits = limits
        self._slice_milliseconds = slice_milliseconds
        self._ranks: Ranks | None = None
        self._loop: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._turns = TimeShares(_KINDS)
        self._takes_turns = device_turns is not None
        self._device = (device_turns or DeviceScheduler()).turn(self.name, self._wake.set, idle_seconds)
        self._backoff = RestartBackoff()
        self._timeouts = CallTimeouts(config)
        self._suspect_runs, self._suspect_jobs = Suspects(), suspect_jobs or Suspects(SUSPECT_SHRINK_FACTOR)
        self._queue = GroupQueue(limits, self._suspect_runs)
        self._running: list[WorkItem[Any]] = []
        self._snapshots = PendingSnapshots(self._wake.set)
        # The work in the current call, including large operations of which more passes will follow.
        self._in_call: Sequence[WorkItem[Any] | SamplingWork] = ()
        # Run -> why its gradients are incomplete: a call that contained its operation failed, which ranks may not know.
        self._incomplete: dict[str, str] = {}
        self._operation_ids = count()
        self._cohorts = Cohorts(self._suspect_jobs)
        self._live: set[str] = set()
        self._lost: dict[str, str] = {}
        self._slices_since_pause = 0
        self._closed: str | None = None

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Loads the model.

        Raises:
            ValueError: it does not load; the message says why.
        """
        source, size = self._config.model.source, loaded_bytes(self._config)
        on_progress(f"loading {self.name} from {source}{f' ({gigabytes(size)})' if size else ''} ...")
        started = time.monotonic()
        await load(self._config, self.name, self._open_or_close, on_progress)
        seconds = time.monotonic() - started
        place = f"{self.info.dtype} on {self.info.device}, {self._processes()}"
        on_progress(f"{self.name} ready in {seconds:.1f} s: {place}")
        self._loop = asyncio.create_task(self._run_loop())
        self._loop.add_done_callback(self._loop_ended)

    async def close(self) -> None:
        self._closed = self._closed or "the server is shutting down"
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait({self._loop})
        self._fail_all(lambda _: OperationError("the server is shutting down", "server"))
        if self._ranks is not None:
            await self._ranks.close()

    def status(self) -> str | None:
        """Describes what work on this model waits for; None if nothing waits."""
        if self.restarting:
            return f"the worker of {self.name} is restarting" + (
                f": {self._placement_error}" if self._placement_error else ""
            )
        if obstacle := self._device.blocked_by():
            return f"{self.name} waits: {obstacle}"
        num_works = self._queue.num_works + len(self._running) + len(self._cohorts) + len(self._snapshots.works())
        if not num_works:
            return None
        works = f"{num_works} operations wait or run" if num_works > 1 else "1 operation waits or runs"
        return f"{works} on {self.name}{self._passes_ahead()}{self._suspects_apart()}"

    def _suspects_apart(self) -> str:
        num_apart = self._cohorts.num_apart
        if not num_apart:
            return ""
        requests = f"{num_apart} sampling requests" if num_apart > 1 else "1 sampling request"
        return f"; {requests} of a worker that died take turns with the others"

    def _passes_ahead(self) -> str:
        num_passes = math.ceil(self._queue.num_tokens / self._limits.max_tokens)
        if not num_passes:
            return ""
        passes = f"{num_passes} passes" if num_passes > 1 else "1 pass"
        return f"; {self._queue.num_tokens} tokens wait for {passes}"

    def pids(self) -> list[int]:
        return self._ranks.pids if self._ranks else []

    async def submit(self, key: str, tenant_id: str, item: Item) -> Any:
        """Returns the item's answer. Items with the same key (a run or adapter) run in the order of submission."""
        self._check_usable(key, item)
        work = self._work(key, tenant_id, item)
        self._queue.add(work)
        self._wake.set()
        try:
            return await work.answer
        except asyncio.CancelledError:
            self._queue.cancel(work)
            raise

    def _work(self, key: str, tenant_id: str, item: Item) -> WorkItem[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(item, ForwardBackwardRequest):
            return PassWorkItem(key, tenant_id, item, answer, next(self._operation_ids))
        return WorkItem(key, tenant_id, item, answer)

    async def memory(self) -> dict[str, int] | None:
        """Returns RankMemory.by_purpose; None if no worker is up, or it dies before it answers."""
        if self._loop is None:
            return None
        try:
            return await self.submit("memory", "", WorkerCall("memory"))
        except OperationError:
            return None

    async def sample(self, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """Samples.

        Args:
            on_progress: called with what each slice adds, if the job streams, until it ends.
        """
        if job.job_id in self._cohorts:
            raise OperationError(f"sampling request {job.job_id} is under way already", "server")
        self._check_usable(job.adapter_id)
        waiting = SamplingWork(job, asyncio.get_running_loop().create_future(), on_progress)
        self._cohorts.add(waiting)
        self._wake.set()
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self.cancel(job.job_id)
            raise

    def cancel(self, job_id: str) -> None:
        """Cancels the job: one that waits is dropped, a running one is dropped with the next slice. Ignores unknown
        jobs.
        """
        if (waiting := self._cohorts.cancel(job_id)) is not None:
            self._wake.set()
            self._suspect_jobs.clear(job_id)
            _settle(waiting.answer, Failure(f"sampling request {job_id} was cancelled", "user"))

    def holds(self, key: str) -> bool:
        """True if the current worker has the run, adapter or draft, as far as is known."""
        return key in self._live

    def forget_lost(self, key: str) -> bool:
        """Forgets the run or adapter; True if it was lost with a worker and is not being rebuilt."""
        self._suspect_runs.clear(key)
        comes_back = key in self._queue or any(work.key == key for work in self._running)
        return self._lost.pop(key, None) is not None and not comes_back

    def _check_usable(self, key: str | None, item: Item | None = None) -> None:
        if self._closed is not None:
            raise OperationError(self._closed, "server")
        anew = isinstance(item, WorkerCall) and item.creates == key
        if key in self._lost and not anew:
            raise WorkerLost(self._lost[key])

    # The lane forms the next call, makes it and delivers the answers; it restarts the worker after a death.

    async def _run_loop(self) -> None:
        while True:
            try:
                await self._serve()
            except WorkerDied as death:
                self._handle_death(death)
                await self._restart()

    def _loop_ended(self, lane: "asyncio.Task[None]") -> None:
        """Fails all waiting work if the lane ends before `close`, which only a bug causes."""
        self._device.release()
        if not lane.cancelled():
            logger.critical("the lane of %s crashed", self.name, exc_info=lane.exception())
            message = self._closed = f"base model {self.name} is out of service after an internal error"
            self._fail_all(lambda _: OperationError(message, "server"))

    async def _serve(self) -> None:
        ranks = self._running_ranks()
        while True:
            kind = self._turns.next(await self._wait_for_work(ranks))
            started, uses_device = time.monotonic(), not self._runs_anywhere(kind)
            match kind:
                case "verbs":
                    await self._run_verb(ranks)
                case "snapshots":
                    await self._advance_snapshots(ranks)
                case "sampling":
                    await self._run_slice(ranks)
                case _:
                    await self._train(ranks)
            self._turns.charge(kind, time.monotonic() - started)
            if uses_device:
                self._device.record_use()

    async def _wait_for_work(self, ranks: Ranks) -> list[str]:
        # Callers that were just answered may submit more, which should be in the next pass.
        await asyncio.sleep(0)
        while not ranks.death.done():
            self._wake.clear()
            wanted = [kind for kind, wants in zip(_KINDS, self._wants(), strict=True) if wants]
            if self._device.must_release(has_work=bool(wanted)):
                await self._leave_device(ranks)
            elif possible := self._possible(wanted):
                return possible
            elif not await self._woken():
                await self._leave_device(ranks)
        # Raised before any work is taken, which would become a suspect.
        raise ranks.death.result()

    async def _woken(self) -> bool:
        """Waits for a wake-up; False if the devices were idle for too long."""
        try:
            await asyncio.wait_for(self._wake.wait(), self._device.seconds_left())
        except TimeoutError:
            return False
        return True

    def _possible(self, wanted: list[str]) -> list[str]:
        possible = wanted if self._device.is_held else [kind for kind in wanted if self._runs_anywhere(kind)]
        if len(possible) < len(wanted):
            self._device.request()
        return wanted if self._device.is_held else possible

    def _runs_anywhere(self, kind: str) -> bool:
        """True if the next call of this kind needs nothing on the devices."""
        if kind == "snapshots":
            return self._snapshots.is_due
        return kind == "verbs" and self._queue.next_verb().method in _ANYWHERE

    async def _leave_device(self, ranks: Ranks) -> None:
        """Offloads the group and releases its devices; if offloading fails, they are shared with the next group."""
        answer = await self._call((), self._verb(ranks, "offload"))
        if isinstance(answer, Failure):
            logger.warning("%s does not leave its device: %s", self.name, answer.message)
        else:
            self._device.record_move(answer)
            self._timeouts.record_move(answer)
        self._device.release()

    def _wants(self) -> tuple[bool, bool, bool, bool]:
        sampling = self._cohorts.wants_slice
        return self._queue.wants_training, self._queue.wants_verb, self._wants_snapshots(), sampling

    def _wants_snapshots(self) -> bool:
        return self._snapshots.is_due or (self._queue.wants_snapshot and self._snapshots.has_room)

    async def _advance_snapshots(self, ranks: Ranks) -> None:
        if self._snapshots.is_due:
            await self._poll_snapshots(ranks)
        else:
            await self._begin_snapshot(ranks)

    async def _poll_snapshots(self, ranks: Ranks) -> None:
        answers = await self._call((), self._verb(ranks, "ended_snapshots"))
        is_failure = isinstance(answers, Failure)
        ended = self._snapshots.fail_all(answers) if is_failure else self._snapshots.take_ended(answers)
        for work, answer in ended:
            _settle(work.answer, answer)

    async def _begin_snapshot(self, ranks: Ranks) -> None:
        work = self._queue.take_snapshot()
        self._running = [work]
        snapshot_id = self._snapshots.next_id()
        snapshot = work.item
        verb = self._verb(ranks, "begin_snapshot", snapshot_id, work.key, snapshot.directory, snapshot.contents)
        answer = await self._call([work], verb)
        if isinstance(answer, Failure):
            _settle(work.answer, answer)
        else:
            self._snapshots.add(snapshot_id, work)
        self._running = []

    async def _run_verb(self, ranks: Ranks) -> None:
        work = self._queue.take_verb()
        self._running = [work]
        answer = await self._call([work], self._verb(ranks, work.item.method, *work.item.arguments))
        self._record_verb(work.key, work.item, answer)
        _settle(work.answer, answer)
        self._running = []

    async def _train(self, ranks: Ranks) -> None:
        if self._queue.steps_are_next():
            await self._run_steps(ranks)
        else:
            await self._run_pass(ranks)

    async def _run_steps(self, ranks: Ranks) -> None:
        works = self._running = self._queue.take_steps()
        steps = tuple(self._with_refusal(work.item) for work in works)
        hang_seconds = self._timeouts.for_steps(len(steps))
        answers = await self._call(works, ranks.call("apply_steps", steps, hang_seconds=hang_seconds))
        if not isinstance(answers, Failure):
            self._forget_incomplete(work.key for work in works)
        for work, answer in zip(works, _answers_for_each(answers, len(works)), strict=True):
            _settle(work.answer, answer)
            self._suspect_runs.record_progress(work.key, work.item.seq_id or None)
        self._running = []

    async def _run_pass(self, ranks: Ranks) -> None:
        pieces = self._queue.take_pass()
        # The others still wait in the queue, for their next passes.
        self._running = [piece.work for piece in pieces if piece.last]
        works, work = [piece.work for piece in pieces], Pass(tuple(piece.part for piece in pieces))
        cost, started = sum(piece.cost for piece in pieces), time.monotonic()
        hang_seconds = self._timeouts.for_pass(cost, len({each.key for each in works}))
        answers = await self._call(works, ranks.run_pass(work, hang_seconds))
        self._timeouts.passes.record(cost, time.monotonic() - started)
        if isinstance(answers, Failure):
            self._incomplete |= {each.work.key: answers.message for each in pieces if not each.work.item.forward_only}
        for piece, answer in zip(pieces, _answers_for_each(answers, len(pieces)), strict=True):
            self._answer_piece(piece, answer)
        self._running = []

    def _with_refusal(self, step: OptimizerStep) -> OptimizerStep:
        reason = self._incomplete.get(step.run_id)
        return step if reason is None else replace(step, refusal_reason=reason)

    def _forget_incomplete(self, run_ids: Iterable[str]) -> None:
        for run_id in run_ids:
            self._incomplete.pop(run_id, None)

    def _answer_piece(self, piece: OperationChunk, answer: object) -> None:
        if not piece.last:
            if not isinstance(answer, Failure):
                return
            self._queue.drop(piece.work)
        _settle(piece.work.answer, answer)
        self._suspect_runs.record_progress(piece.work.key, piece.work.item.seq_id or None)

    async def _call(self, about: "Sequence[WorkItem[Any] | SamplingWork]", call: Awaitable[Any]) -> Any:
        """Returns the ranks' answer, or a Failure if the call failed."""
        self._in_call = about
        try:
            answer = await call
        except WorkerDied:
            raise
        except Exception as error:
            answer = _as_failure(error)
        self._in_call = ()
        return answer

    def _verb(self, ranks: Ranks, method: str, *arguments: object) -> Awaitable[Any]:
        return ranks.call(method, *arguments, hang_seconds=self._timeouts.for_verb(method))

    async def _run_slice(self, ranks: Ranks) -> None:
        cohort = self._cohorts.next()
        work = cohort.slice(self._next_slice_milliseconds(cohort))
        started = time.monotonic()
        call = ranks.run_slice(work, self._timeouts.for_slice(work.budget_milliseconds))
        result: SliceResult | Failure = await self._call(tuple(cohort.running.values()), call)
        self._timeouts.slices.record(1.0, time.monotonic() - started)
        if isinstance(result, Failure):
            result = SliceResult(dict.fromkeys(self._cohorts.drop_running(), result), 0)
        for job_id, parts in result.progress.items():
            if (streaming := cohort.running.get(job_id)) and streaming.on_progress is not None:
                streaming.on_progress(parts)
        for job_id, answer in result.finished.items():
            if waiting := self._cohorts.ended(job_id):
                _settle(waiting.answer, answer)
                self._suspect_jobs.clear(job_id)
        for job_id, waiting in cohort.running.items():
            waiting.num_slices += 1
            self._suspect_jobs.record_progress(job_id, waiting.num_slices)

    def _next_slice_milliseconds(self, cohort: Cohort) -> float:
        """Returns the next slice's length. The first slices after a pause are short, because a client that sends one
        sampling request mostly sends more right after it.
        """
        is_pause = len(self._cohorts) == len(cohort.joining)
        number = self._slices_since_pause = 0 if is_pause else self._slices_since_pause + 1
        part = _FIRST_SLICES[number] if number < len(_FIRST_SLICES) else 1
        return self._slice_milliseconds * part

    def _record_verb(self, key: str, verb: WorkerCall, answer: object) -> None:
        """Records what the verb changed. Done here, not by the caller, so that a death right after the answer finds the
        run.
        """
        if isinstance(answer, Failure):
            return
        if verb.creates is not None:
            self._live.add(verb.creates)
            self._lost.pop(verb.creates, None)
        if verb.method in _CLEARING:
            self._forget_incomplete([key])
        if verb.drops is not None:
            self._live.discard(verb.drops)
            self._suspect_runs.clear(verb.drops)

    def _handle_death(self, death: WorkerDied) -> None:
        self.num_deaths += 1
        consequences = self._accuse(self._in_call)
        logger.error("base model %s: %s%s", self.name, death, consequences)
        for key in self._live:
            self._lost[key] = (
                f"{key} was lost when the worker of {self.name} died ({death}): its progress since it was last "
                "saved is gone; create it again"
            )
        self._live.clear()
        self._incomplete.clear()
        message = f"base model {self.name}: {death}; what only the worker had is lost"
        alone = self._in_call if len(self._in_call) == 1 else ()
        self._fail_all(lambda work: WorkerLost(message, alone=work in alone))

    def _accuse(self, in_call: "Sequence[WorkItem[Any] | SamplingWork]") -> str:
        runs: dict[str, int] = {}
        for work in in_call:
            if isinstance(work, WorkItem) and isinstance(work.item, ForwardBackwardRequest | OptimizerStep):
                runs[work.key] = max(work.item.seq_id, runs.get(work.key, 0))
        self._suspect_runs.accuse({key: seq_id or None for key, seq_id in runs.items()})
        jobs = {each.job.job_id: each.safe_position for each in in_call if isinstance(each, SamplingWork)}
        self._suspect_jobs.accuse(jobs)
        return _consequences("runs", runs, self._suspect_runs) + _consequences("requests", jobs, self._suspect_jobs)

    def _fail_all(self, error_of: "Callable[[WorkItem[Any] | SamplingWork], OperationError]") -> None:
        waiting = [
            *self._running,
            *self._snapshots.works(),
            *self._queue.works(),
            *self._cohorts.works(),
        ]
        self._queue = GroupQueue(self._limits, self._suspect_runs)
        self._snapshots.forget()
        self._cohorts = Cohorts(self._suspect_jobs)
        self._running, self._in_call = [], ()
        for each in waiting:
            # A drop succeeds: the worker's death dropped everything.
            dropped = isinstance(each, WorkItem) and isinstance(each.item, WorkerCall) and each.item.drops is not None
            _settle(each.answer, None if dropped else error_of(each))

    async def _restart(self) -> None:
        self.restarting = True
        await self._running_ranks().close()
        self._device.release()
        while not await self._try_to_open():
            pass
        self.restarting = False

    async def _try_to_open(self) -> bool:
        await asyncio.sleep(_PLACE_SECONDS if self._placement_error else self._backoff.next_delay())
        try:
            await self._open_or_close()
        except PlacementError as error:
            if str(error) != str(self._placement_error):
                logger.error("base model %s cannot be placed: %s", self.name, error)
            self._placement_error = error
            return False
        except (WorkerDied, WorkerError, ValueError, OSError, EOFError) as error:
            # OSError: the system has no memory, process or file for us at the moment.
            logger.error("base model %s does not restart: %s", self.name, failure_reason(error, self._config))
            self._placement_error = None
            return False
        self._placement_error = None
        logger.warning("base model %s is back: %s", self.name, self._processes())
        return True

    async def _open_or_close(self) -> None:
        try:
            await self._open_ranks()
        except BaseException:
            # A rank may have died between its start and its first answer, still holding its resources.
            if self._ranks is not None:
                await self._ranks.close()
            self._device.release()
            raise

    async def _open_ranks(self) -> None:
        await self._device.acquire()
        self._ranks = self._new_ranks()
        # The first load may include a download, with someone watching, so it has no limit.
        loading_seconds = self._timeouts.loading_seconds if self.num_deaths else math.inf
        await self._ranks.start(loading_seconds, self._timeouts.for_verb("reset"))
        self._ranks.death.add_done_callback(lambda _: self._wake.set())
        self._backoff.started()
        self.info = await self._verb(self._ranks, "info")
        if self._takes_turns:
            await self._register_devices(self._ranks)

    async def _register_devices(self, ranks: Ranks) -> None:
        """Learns the ranks' devices. The ranks loaded as if alone there, so the group leaves and takes its turn."""
        devices = frozenset(await ranks.call_each("device_name", hang_seconds=self._timeouts.for_verb("device_name")))
        if devices != self._device.devices:
            await self._leave_device(ranks)
            self._device.devices = devices

    def _new_ranks(self) -> Ranks:
        return Ranks(self._new_pool(self._config), self._config.parallel, self._config.shared_directories)

    def _processes(self) -> str:
        pids = ", ".join(map(str, self.pids()))
        return f"{self._config.parallel}, processes {pids}" if "," in pids else f"process {pids}"

    def _running_ranks(self) -> Ranks:
        assert self._ranks is not None, "the lane runs only after start()"
        return self._ranks


def _consequences(what: str, accused: Mapping[str, int], suspects: Suspects) -> str:
    if len(accused) < 2:
        return ""
    most = suspects.most_together(accused)
    return (
        f"; {len(accused)} {what} were in the call: until they get past that point they run apart from all"
        f" others, {most:.0f} at a time"
    )


def _as_failure(error: Exception) -> Failure:
    if isinstance(error, OperationError):
        return Failure(error.message, error.category)
    if not isinstance(error, WorkerError):
        logger.error("a call to the worker failed", exc_info=error)
    return Failure(f"the worker failed: {error}", "server")


def _answers_for_each(answers: Any, num_works: int) -> Sequence[object]:
    return [answers] * num_works if isinstance(answers, Failure) else answers


def _settle(future: "asyncio.Future[Any]", answer: object) -> None:
    if future.done():
        return
    if isinstance(answer, Failure):
        future.set_exception(OperationError(answer.message, answer.category))
    elif isinstance(answer, OperationError):
        future.set_exception(answer)
    else:
        future.set_result(answer)

"""Runs the work of the ranks that hold one base model.

A group makes one call to its ranks at a time, so that all of them see work in the same order. The scheduler decides
which; the supervisor starts and restarts the ranks.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ...schemas.errors import OperationError
from ...schemas.sampling import SampleResponse
from ..pools.base import Pool, WorkerDied
from ..protocol.calls import Failure, SampleJob
from ..protocol.methods import Method
from ..protocol.work_context import CURRENT_WORK
from ..protocol.worker_config import WorkerConfig, default_pass_tokens
from .calls import IDLE, RESTARTING, EndedCall, RankCall
from .quarantine import Suspects
from .queue import PassLimits
from .scheduler import Scheduler
from .supervision.device_sharing import DeviceLease, DeviceScheduler
from .supervision.supervisor import Supervisor
from .work import AnyWork, MethodWork, OnProgress, RunWork, SamplingWork

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RankGroup:
    """Runs the work given to `submit` and `sample` in its loop, until `close`."""

    def __init__(
        self,
        config: WorkerConfig,
        new_pool: Callable[[WorkerConfig], Pool],
        limits: PassLimits,
        slice_milliseconds: float,
        name: str | None = None,
        device_scheduler: DeviceScheduler | None = None,
        idle_seconds: float | None = None,
        suspect_jobs: Suspects | None = None,
    ) -> None:
        """Builds the group; `start` loads it.

        Args:
            name: for messages; the model's served name unless given.
            device_scheduler: None if the group does not share its devices by turns.
            idle_seconds: idle time after which it is offloaded from its devices; None means never.
            suspect_jobs: shared by groups that may receive each other's sampling jobs; None means private.
        """
        self.name = name or config.model.name
        self._spec = config.parallel
        self._wake = asyncio.Event()
        device = DeviceLease(device_scheduler or DeviceScheduler(), self.name, self._wake.set, idle_seconds)
        takes_turns = device_scheduler is not None
        self.supervisor = Supervisor(self.name, config, new_pool, device, self._wake.set, takes_turns)
        self.scheduler = Scheduler(limits, slice_milliseconds, suspect_jobs)
        self.on_call: Callable[[EndedCall], None] | None = None
        """Called with each call that has ended."""
        self._call: RankCall[Any] | None = None
        self._loop: asyncio.Task[None] | None = None
        self._closed: str | None = None

    @property
    def activity(self) -> str:
        """Returns what the ranks are doing, one of ACTIVITIES."""
        if self.supervisor.is_restarting:
            return RESTARTING
        return IDLE if self._call is None else self._call.activity

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Loads the model.

        Raises:
            ValueError: it does not load; the message says why.
        """
        await self.supervisor.start(on_progress)
        if not self.scheduler.limits.max_tokens:
            info = self.supervisor.info
            most = default_pass_tokens(info.micro_batch_tokens, self._spec, info.device == "cpu")
            self.scheduler.set_pass_tokens(most)
        self._loop = asyncio.create_task(self._run_loop())
        self._loop.add_done_callback(self._loop_ended)

    async def close(self) -> None:
        self._closed = self._closed or "the server is shutting down"
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait({self._loop})
        self._fail_all("the server is shutting down")
        await self.supervisor.close()

    def status(self) -> str | None:
        """Describes what work on this model waits for; None if nothing waits."""
        if self.supervisor.is_restarting:
            error = self.supervisor.placement_error
            return f"the worker of {self.name} is restarting" + (f": {error}" if error else "")
        if obstacle := self.supervisor.device.blocked_by():
            return f"{self.name} waits: {obstacle}"
        return self.scheduler.describe(self.name, num_taken=0 if self._call is None else self._call.num_taken)

    async def submit(self, work: RunWork[T]) -> T:
        """Returns the work's answer. Work with the same key (a run or adapter) runs in the order of submission."""
        if self._closed is not None:
            raise OperationError(self._closed, "server")
        if work.creates != work.key:
            self.scheduler.held.check_available(work.key)
        work.answer, work.context = asyncio.get_running_loop().create_future(), CURRENT_WORK.get()
        self.scheduler.queue.enqueue(work)
        self._wake.set()
        try:
            return await work.answer
        except asyncio.CancelledError:
            self.scheduler.queue.cancel(work)
            raise

    async def sample(self, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """Samples.

        Args:
            on_progress: called with what each slice adds, if the job streams, until it ends.
        """
        if job.job_id in self.scheduler.cohorts:
            raise OperationError(f"sampling request {job.job_id} is under way already", "server")
        if self._closed is not None:
            raise OperationError(self._closed, "server")
        self.scheduler.held.check_available(job.adapter_id)
        sampling = SamplingWork(job, on_progress)
        sampling.answer, sampling.context = asyncio.get_running_loop().create_future(), CURRENT_WORK.get()
        self.scheduler.cohorts.enqueue_job(sampling)
        self._wake.set()
        try:
            return await sampling.answer
        except asyncio.CancelledError:
            self.cancel(job.job_id)
            raise

    def cancel(self, job_id: str) -> None:
        """Cancels the job: one that waits is dropped, a running one is dropped with the next slice. Ignores unknown
        jobs.
        """
        if (sampling := self.scheduler.cohorts.cancel(job_id)) is not None:
            self._wake.set()
            self.scheduler.suspect_jobs.pop(job_id, None)
            sampling.settle(Failure(f"sampling request {job_id} was cancelled", "user"))

    async def ask(self, method: Method[T]) -> T | None:
        """Returns the answer of a method without arguments; None if no worker is up, or it dies before it answers."""
        if self._loop is None:
            return None
        try:
            return await self.submit(MethodWork(method.name, "", method))
        except OperationError:
            return None

    def forget_lost(self, key: str, *, keeps_suspicion: bool = False) -> bool:
        """Forgets that the run or adapter was lost; True if the ranks have nothing of it, and no work waits for it.

        Args:
            keeps_suspicion: it stays a suspect if it is one.
        """
        if not keeps_suspicion:
            self.scheduler.suspect_runs.pop(key, None)
            self.scheduler.suspect_snapshots.pop(key, None)
        in_call = any(isinstance(work, RunWork) and work.key == key for work in self._called_works())
        has_work = key in self.scheduler.queue or in_call
        return self.scheduler.held.forget_lost(key) and not has_work

    async def _run_loop(self) -> None:
        while True:
            try:
                call = self._call = await self._next_call()
                await self._make(call)
                self._call = None
            except WorkerDied as death:
                works, self._call = self._called_works(), None
                consequences = self.scheduler.worker_died(self.name, death, works)
                logger.error("base model %s: %s%s", self.name, death, consequences)
                await self.supervisor.restart()

    async def _make(self, call: RankCall[Any]) -> None:
        supervisor, ranks = self.supervisor, self.supervisor.ranks
        began_at, started = time.time(), time.monotonic()
        for work in call.works:
            if isinstance(work, RunWork) and work.on_begin is not None:
                work.on_begin(call.size)
        answer = await supervisor.answer_or_failure(call.send(ranks, supervisor.timeouts))
        seconds = time.monotonic() - started
        call.record(supervisor.timeouts, seconds)
        if self.on_call is not None:
            error = answer.message if isinstance(answer, Failure) else None
            rank_times = ranks.pool.rank_times
            self.on_call(EndedCall(self.name, call, began_at, seconds, rank_times, ranks.idle_tokens, error))
        self.scheduler.finish(call, answer, seconds)
        if call.uses_device:
            device = supervisor.device
            device.idle_at = time.monotonic() + device.idle_seconds

    async def _next_call(self) -> RankCall[Any]:
        """Waits for work that can run now. Raises WorkerDied before any is taken, which would become a suspect."""
        # Callers that were just answered may submit more, which should be in the next pass.
        await asyncio.sleep(0)
        scheduler, device, death = self.scheduler, self.supervisor.device, self.supervisor.ranks.pool.death
        while not death.done():
            self._wake.clear()
            if not device.is_held and len(scheduler.ready()) > len(scheduler.ready(on_device=False)):
                device.request()
            if device.is_contested and device.must_release(has_work=bool(scheduler.ready())):
                await self.supervisor.leave_device()
            elif (call := scheduler.next_call(device.is_held)) is not None:
                return call
            else:
                until = min(device.idle_at, self.scheduler.snapshots.due_at)
                seconds = None if until == math.inf else max(0.0, until - time.monotonic())
                try:
                    await asyncio.wait_for(self._wake.wait(), seconds)
                except TimeoutError:
                    if until == device.idle_at:
                        await self.supervisor.leave_device()
        raise death.result()

    def _loop_ended(self, loop: "asyncio.Task[None]") -> None:
        """Fails all waiting work if the loop ends before `close`, which only a bug causes."""
        self.supervisor.device.release()
        if not loop.cancelled():
            logger.critical("the loop of %s crashed", self.name, exc_info=loop.exception())
            self._closed = f"base model {self.name} is out of service after an internal error"
            self._fail_all(self._closed)

    def _fail_all(self, reason: str) -> None:
        self.scheduler.fail_all(lambda _: OperationError(reason, "server"), self._called_works())

    def _called_works(self) -> Sequence[AnyWork]:
        return () if self._call is None else self._call.works

"""Runs the work of the ranks that hold one base model.

A group makes one call to its ranks at a time, so that all of them see work in the same order. The scheduler decides
which; the supervisor starts and restarts the ranks.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from ...schemas.errors import OperationError
from ...schemas.models import Utilization
from ...schemas.sampling import SampleResponse
from ..pools.base import Pool, WorkerDied
from ..protocol.calls import Failure, ModelInfo, SampleJob
from ..protocol.work_context import current_work
from ..protocol.worker_config import WorkerConfig, default_pass_tokens
from .fair_queue import PassLimits
from .group_work import GroupWork
from .quarantine import Suspects
from .rank_calls import IDLE, RESTARTING, EndedCall, RankCall
from .scheduler import Scheduler
from .supervision.device_sharing import DeviceScheduler
from .supervision.supervisor import Supervisor
from .work import MethodWork, OnProgress, SamplingWork, WorkItem

logger = logging.getLogger(__name__)


class RankGroup:
    """Runs the work given to `submit` and `sample` in its loop, until `close`.

    on_call: called with each call that has ended. The class is long because submitting, cancelling and describing work
    share the state of the loop that runs it.
    """

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
        device = (device_scheduler or DeviceScheduler()).lease(self.name, self._wake.set, idle_seconds)
        takes_turns = device_scheduler is not None
        self.supervisor = Supervisor(self.name, config, new_pool, device, self._wake.set, takes_turns)
        self.work = GroupWork(limits, suspect_jobs)
        self._scheduler = Scheduler(self.work, slice_milliseconds)
        self.on_call: Callable[[EndedCall], None] | None = None
        self._call: RankCall | None = None
        self._loop: asyncio.Task[None] | None = None
        self._closed: str | None = None

    @property
    def info(self) -> ModelInfo:
        """Describes the loaded model."""
        return self.supervisor.info

    @property
    def num_deaths(self) -> int:
        return self.supervisor.num_deaths

    @property
    def is_restarting(self) -> bool:
        """True from a death of a worker until the new workers are ready."""
        return self.supervisor.is_restarting

    @property
    def pids(self) -> list[int]:
        return self.supervisor.pids

    @property
    def activity(self) -> str:
        """Returns what the ranks are doing, one of ACTIVITIES."""
        if self.is_restarting:
            return RESTARTING
        return IDLE if self._call is None else self._call.activity

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Loads the model.

        Raises:
            ValueError: it does not load; the message says why.
        """
        await self.supervisor.start(on_progress)
        if not self.work.limits.max_tokens:
            on_cpu = self.info.device == "cpu"
            self.work.set_pass_tokens(default_pass_tokens(self.info.micro_batch_tokens, self._spec, on_cpu))
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
        if self.is_restarting:
            error = self.supervisor.placement_error
            return f"the worker of {self.name} is restarting" + (f": {error}" if error else "")
        if obstacle := self.supervisor.device.blocked_by():
            return f"{self.name} waits: {obstacle}"
        work, num_taken = self.work, 0 if self._call is None else self._call.num_taken
        num_works = work.queue.num_works + num_taken + len(work.cohorts) + len(work.snapshots.works())
        if not num_works:
            return None
        works = f"{num_works} operations wait or run" if num_works > 1 else "1 operation waits or runs"
        return f"{works} on {self.name}{self._passes_ahead()}{self._suspects_apart()}"

    def _suspects_apart(self) -> str:
        num_apart = self.work.cohorts.num_apart
        if not num_apart:
            return ""
        requests = f"{num_apart} sampling requests" if num_apart > 1 else "1 sampling request"
        return f"; {requests} of a worker that died take turns with the others"

    def _passes_ahead(self) -> str:
        num_tokens = self.work.queue.num_tokens
        num_passes = math.ceil(num_tokens / self.work.limits.max_tokens)
        if not num_passes:
            return ""
        passes = f"{num_passes} passes" if num_passes > 1 else "1 pass"
        return f"; {num_tokens} tokens wait for {passes}"

    async def submit(self, work: WorkItem) -> Any:
        """Returns the work's answer. Work with the same key (a run or adapter) runs in the order of submission."""
        self._check_open()
        if work.creates != work.key:
            self.work.check_available(work.key)
        work.answer, work.context = asyncio.get_running_loop().create_future(), current_work()
        self.work.queue.add(work)
        self._wake.set()
        try:
            return await work.answer
        except asyncio.CancelledError:
            self.work.queue.cancel(work)
            raise

    async def sample(self, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """Samples.

        Args:
            on_progress: called with what each slice adds, if the job streams, until it ends.
        """
        if job.job_id in self.work.cohorts:
            raise OperationError(f"sampling request {job.job_id} is under way already", "server")
        self._check_open()
        self.work.check_available(job.adapter_id)
        sampling = SamplingWork(job, on_progress)
        sampling.answer, sampling.context = asyncio.get_running_loop().create_future(), current_work()
        self.work.cohorts.add(sampling)
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
        if (sampling := self.work.cohorts.cancel(job_id)) is not None:
            self._wake.set()
            self.work.suspect_jobs.clear(job_id)
            sampling.settle(Failure(f"sampling request {job_id} was cancelled", "user"))

    async def memory(self) -> dict[str, int] | None:
        """Returns RankMemory.by_purpose; None if no worker is up, or it dies before it answers."""
        return await self._ask("memory")

    async def utilization(self) -> Utilization | None:
        """Returns the use of its devices; None as for `memory`."""
        return await self._ask("utilization")

    async def _ask(self, method: str) -> Any:
        if self._loop is None:
            return None
        try:
            return await self.submit(MethodWork(method, "", method))
        except OperationError:
            return None

    def holds(self, key: str) -> bool:
        """True if the current worker has the run, adapter or draft, as far as is known."""
        return self.work.holds(key)

    def forget_lost(self, key: str) -> bool:
        """Forgets the run or adapter; True if it was lost with a worker and is not being rebuilt."""
        works = () if self._call is None else self._call.works
        is_rebuilt = key in self.work.queue or any(isinstance(each, WorkItem) and each.key == key for each in works)
        return self.work.forget_lost(key) and not is_rebuilt

    def _check_open(self) -> None:
        if self._closed is not None:
            raise OperationError(self._closed, "server")

    async def _run_loop(self) -> None:
        while True:
            try:
                await self._make_calls()
            except WorkerDied as death:
                self._handle_death(death)
                await self.supervisor.restart()

    async def _make_calls(self) -> None:
        supervisor, scheduler = self.supervisor, self._scheduler
        while True:
            call = self._call = scheduler.next_call(await self._wait_for_work())
            began_at, started, size = time.time(), time.monotonic(), call.size
            for work in call.works:
                if isinstance(work, WorkItem) and work.on_begin is not None:
                    work.on_begin(size)
            answer = await supervisor.answer(call.send(supervisor.ranks, supervisor.timeouts))
            seconds = time.monotonic() - started
            call.record(supervisor.timeouts, seconds)
            if self.on_call is not None:
                ranks, error = supervisor.ranks, answer.message if isinstance(answer, Failure) else None
                ended = EndedCall(self.name, call, began_at, seconds, ranks.rank_times, ranks.idle_tokens, error)
                self.on_call(ended)
            scheduler.finish(call, answer, seconds)
            self._call = None
            if call.uses_device:
                supervisor.device.record_use()

    async def _wait_for_work(self) -> list[str]:
        """Returns the kinds of calls that are wanted and possible. Raises WorkerDied."""
        # Callers that were just answered may submit more, which should be in the next pass.
        await asyncio.sleep(0)
        death, device = self.supervisor.ranks.death, self.supervisor.device
        while not death.done():
            self._wake.clear()
            wanted = self._scheduler.wanted()
            if device.must_release(has_work=bool(wanted)):
                await self.supervisor.leave_device()
            elif possible := self._possible(wanted):
                return possible
            elif not await self._woken():
                await self.supervisor.leave_device()
        # Raised before any work is taken, which would become a suspect.
        raise death.result()

    def _possible(self, wanted: list[str]) -> list[str]:
        device = self.supervisor.device
        if device.is_held:
            return wanted
        possible = self._scheduler.without_device(wanted)
        if len(possible) < len(wanted):
            device.request()
        return wanted if device.is_held else possible

    async def _woken(self) -> bool:
        """Waits for a wake-up; False if the devices were idle for too long."""
        idle_seconds, poll_seconds = self.supervisor.device.seconds_left(), self._scheduler.seconds_to_poll()
        seconds = min((each for each in (idle_seconds, poll_seconds) if each is not None), default=None)
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            return seconds != idle_seconds
        return True

    def _handle_death(self, death: WorkerDied) -> None:
        works = () if self._call is None else self._call.works
        self._call = None
        consequences = self.work.worker_died(self.name, death, works)
        logger.error("base model %s: %s%s", self.name, death, consequences)

    def _loop_ended(self, loop: "asyncio.Task[None]") -> None:
        """Fails all waiting work if the loop ends before `close`, which only a bug causes."""
        self.supervisor.device.release()
        if not loop.cancelled():
            logger.critical("the loop of %s crashed", self.name, exc_info=loop.exception())
            self._closed = f"base model {self.name} is out of service after an internal error"
            self._fail_all(self._closed)

    def _fail_all(self, reason: str) -> None:
        works = () if self._call is None else self._call.works
        self.work.fail_all(lambda _: OperationError(reason, "server"), works)

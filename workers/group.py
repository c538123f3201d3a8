"""Group: the ranks that hold one base model, the work that waits for them, and the lane that makes calls of it.

A group calls its ranks one call at a time, so that all of them see the same order of work.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..schemas.errors import OperationError
from ..schemas.sampling import SampleResponse
from ..schemas.training import ForwardBackwardRequest
from .config import WorkerConfig
from .footprint import gigabytes, loaded_bytes
from .pool import Pool, WorkerDied, WorkerError
from .verbs import Failure, ModelInfo, Part, Pass, SampleJob, Slice, SliceResult, Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verb:
    """A call that concerns one run or adapter alone. creates, drops: the id that the worker holds (or not) after it."""

    method: str
    arguments: tuple[object, ...] = ()
    creates: str | None = None
    drops: str | None = None


Item = ForwardBackwardRequest | Step | Verb


class Group:
    """Submit with `submit` and `sample`; the lane does the rest, until `close`.

    info: the loaded model. restarting: the worker died and its successor is not ready yet.
    """

    info: ModelInfo

    def __init__(
        self, config: WorkerConfig, new_pool: Callable[[WorkerConfig], Pool], slice_milliseconds: float
    ) -> None:
        self.restarting = False
        self._config = config
        self._new_pool = new_pool
        self._slice_milliseconds = slice_milliseconds
        self._pool: Pool | None = None
        self._lane: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._turns = Turns()
        self._backoff = Backoff()
        self._queue = Queue()
        self._running: list[_Work] = []
        self._joining: dict[str, _Sampling] = {}
        self._sampling: dict[str, _Sampling] = {}
        self._cancelled: list[str] = []
        self._live: set[str] = set()
        self._lost: dict[str, str] = {}
        self._closed = False

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Loads the model. Raises ValueError with the reason when it does not load."""
        model, size = self._config.model, loaded_bytes(self._config)
        on_progress(f"loading {model.name} from {model.source}{f' ({gigabytes(size)})' if size else ''} ...")
        started = time.monotonic()
        try:
            await self._open_pool()
        except (WorkerDied, WorkerError) as error:
            raise ValueError(f"base model {model.name} does not load from {model.source}: {error}") from error
        seconds = time.monotonic() - started
        on_progress(f"{model.name} ready in {seconds:.1f} s: {self.info.dtype} on {self.info.device}")
        self._lane = asyncio.create_task(self._run_lane())
        self._lane.add_done_callback(self._lane_ended)

    async def close(self) -> None:
        self._closed = True
        if self._lane is not None:
            self._lane.cancel()
            await asyncio.wait({self._lane})
        self._fail_all("the server is shutting down")
        if self._pool is not None:
            await self._pool.close()

    def status(self) -> str | None:
        """What the work on this model waits for, in words; None when there is none."""
        if self.restarting:
            return f"the worker of {self._config.model.name} is restarting"
        num_waiting = len(self._queue) + len(self._running) + len(self._joining) + len(self._sampling)
        return f"{num_waiting} operations wait or run on {self._config.model.name}" if num_waiting else None

    def pids(self) -> list[int]:
        return self._pool.pids if self._pool else []

    async def submit(self, key: str, item: Item) -> Any:
        """The item's answer. key: the run (or adapter) whose items run in the order in which they are submitted."""
        self._check_usable(key, item)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.add(_Work(key, item, answer))
        self._wake.set()
        return await answer

    async def sample(self, job: SampleJob) -> SampleResponse:
        if job.job_id in self._joining or job.job_id in self._sampling:
            raise OperationError(f"sampling request {job.job_id} is under way already", "server")
        self._check_usable(job.adapter_id)
        waiting = self._joining[job.job_id] = _Sampling(job, asyncio.get_running_loop().create_future())
        self._wake.set()
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self.cancel(job.job_id)
            raise

    def cancel(self, job_id: str) -> None:
        """Before it joined, the job is dropped; after, the next slice leaves it out. Finished or unknown: no-op."""
        waiting = self._joining.pop(job_id, None)
        if waiting is None and (waiting := self._sampling.pop(job_id, None)):
            self._cancelled.append(job_id)
            self._wake.set()
        if waiting is not None:
            _settle(waiting.answer, Failure(f"sampling request {job_id} was cancelled", "user"))

    def forget_lost(self, key: str) -> bool:
        """Whether the run or adapter was lost with a worker; from now on it is unknown."""
        return self._lost.pop(key, None) is not None

    def _check_usable(self, key: str | None, item: Item | None = None) -> None:
        if self._closed:
            raise OperationError("the server is shutting down", "server")
        anew = isinstance(item, Verb) and item.creates == key
        if key in self._lost and not anew:
            raise OperationError(self._lost[key], "server")

    # The lane: forms the next call, makes it, hands out the answers; and starts again when the worker dies.

    async def _run_lane(self) -> None:
        while True:
            try:
                await self._serve()
            except WorkerDied as death:
                self._lose(death)
                await self._restart()

    def _lane_ended(self, lane: "asyncio.Task[None]") -> None:
        """Before `close` only a mistake of ours ends it; nobody may wait for it in silence then."""
        if not lane.cancelled():
            logger.critical("the lane of %s crashed", self._config.model.name, exc_info=lane.exception())
            self._closed = True
            self._fail_all(f"base model {self._config.model.name} is out of service after an internal error")

    async def _serve(self) -> None:
        pool = self._opened()
        while True:
            await self._wait_for_work(pool)
            started = time.monotonic()
            if training := self._turns.training_is_next(bool(self._queue), self._wants_to_sample()):
                await self._run_next_call(pool)
            else:
                await self._run_slice(pool)
            self._turns.spent(training, time.monotonic() - started)

    async def _wait_for_work(self, pool: Pool) -> None:
        while not (self._queue or self._wants_to_sample()):
            if pool.death.done():
                raise pool.death.result()
            self._wake.clear()
            await self._wake.wait()

    def _wants_to_sample(self) -> bool:
        return bool(self._joining or self._sampling or self._cancelled)

    async def _run_next_call(self, pool: Pool) -> None:
        self._running = self._queue.take()
        try:
            answers = await self._call(pool, [work.item for work in self._running])
        except WorkerDied:
            raise
        except Exception as error:
            answers = [_as_failure(error)] * len(self._running)
        for work, answer in zip(self._running, answers, strict=True):
            self._note(work.item, answer)
            _settle(work.answer, answer)
        self._running = []

    async def _call(self, pool: Pool, items: list[Item]) -> Sequence[Any]:
        """One answer per item: with one rank per group, that rank's."""
        match items[0]:
            case Verb(method, arguments):
                return await pool.call(method, *arguments)
            case Step():
                [answers] = await pool.call("apply_steps", tuple(items))
            case ForwardBackwardRequest() as operation:
                [answers] = await pool.call("run_pass", Pass((Part(0, operation),)))
        assert len(answers) == len(items), f"{len(answers)} answers to {len(items)} items"
        return answers

    async def _run_slice(self, pool: Pool) -> None:
        work = Slice(
            join=tuple(waiting.job for waiting in self._joining.values()),
            cancel=tuple(self._cancelled),
            budget_milliseconds=self._slice_milliseconds,
        )
        self._sampling |= self._joining
        self._joining, self._cancelled = {}, []
        try:
            result: SliceResult = (await pool.call("sample_slice", work))[0]
        except WorkerDied:
            raise
        except Exception as error:
            # Nobody knows how far the slice came, so none of its requests can go on.
            self._cancelled = list(self._sampling)
            result = SliceResult(dict.fromkeys(self._sampling, _as_failure(error)), 0)
        for job_id, answer in result.finished.items():
            if waiting := self._sampling.pop(job_id, None):
                _settle(waiting.answer, answer)

    def _note(self, item: Item, answer: object) -> None:
        """Here and not by the caller: a death right after the answer must find the run among the live."""
        if isinstance(item, Verb) and not isinstance(answer, Failure):
            if item.creates is not None:
                self._live.add(item.creates)
                self._lost.pop(item.creates, None)
            self._live.discard(item.drops or "")

    def _lose(self, death: WorkerDied) -> None:
        name = self._config.model.name
        logger.error("base model %s: %s", name, death)
        for key in self._live:
            self._lost[key] = (
                f"{key} was lost when the worker of {name} died ({death}): training state since the last checkpoint is "
                "gone; create a new run or sampler from a checkpoint"
            )
        self._live.clear()
        self._fail_all(f"base model {name}: {death}; training state since the last checkpoint is lost")

    def _fail_all(self, message: str) -> None:
        waiting = [*self._running, *self._queue.take_all(), *self._joining.values(), *self._sampling.values()]
        self._running, self._joining, self._sampling, self._cancelled = [], {}, {}, []
        for each in waiting:
            # What was to be dropped is gone.
            dropped = isinstance(each, _Work) and isinstance(each.item, Verb) and each.item.drops is not None
            _settle(each.answer, None if dropped else Failure(message, "server"))

    async def _restart(self) -> None:
        self.restarting = True
        await self._opened().close()
        while not await self._try_to_open():
            pass
        self.restarting = False

    async def _try_to_open(self) -> bool:
        await asyncio.sleep(self._backoff.next_delay())
        try:
            await self._open_pool()
        except (WorkerDied, WorkerError, ValueError) as error:
            logger.error("base model %s does not come back: %s", self._config.model.name, error)
            # It may have died between its start and its first answer, still holding its place.
            await self._opened().close()
            return False
        logger.warning("base model %s is back", self._config.model.name)
        return True

    async def _open_pool(self) -> None:
        self._pool = self._new_pool(self._config)
        await self._pool.start()
        self._pool.death.add_done_callback(lambda _: self._wake.set())
        self._backoff.started()
        [self.info, *_] = await self._pool.call("info")

    def _opened(self) -> Pool:
        assert self._pool is not None, "the lane runs only after start()"
        return self._pool


@dataclass(eq=False)
class _Work:
    key: str
    item: Item
    answer: "asyncio.Future[Any]"


@dataclass(eq=False)
class _Sampling:
    job: SampleJob
    answer: "asyncio.Future[SampleResponse]"


class Queue:
    """Waiting work: in order for each key, round-robin over the keys."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, deque[_Work]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def add(self, work: _Work) -> None:
        self._by_key.setdefault(work.key, deque()).append(work)
        work.answer.add_done_callback(lambda answer: self._remove(work) if answer.cancelled() else None)

    def take(self) -> list[_Work]:
        """The next call's work: the item of the key whose turn it is; if that is a step, the steps of all keys."""
        work = self._pop(next(iter(self._by_key)))
        if not isinstance(work.item, Step):
            return [work]
        others = [key for key, works in self._by_key.items() if key != work.key and isinstance(works[0].item, Step)]
        return [work, *map(self._pop, others)]

    def take_all(self) -> list[_Work]:
        works = [work for works in self._by_key.values() for work in works]
        self._by_key.clear()
        return works

    def _pop(self, key: str) -> _Work:
        works = self._by_key[key]
        work = works.popleft()
        if works:
            self._by_key.move_to_end(key)
        else:
            del self._by_key[key]
        return work

    def _remove(self, work: _Work) -> None:
        """Its caller was cancelled. Work that has been taken goes on."""
        works = self._by_key.get(work.key, deque())
        if work in works:
            works.remove(work)
            if not works:
                del self._by_key[work.key]


@dataclass
class Turns:
    """Shares the ranks' time between training and sampling: of the two, the one that has had less goes next.

    Each has a clock of the seconds it got. One that does not want the ranks is set forward to the other's clock, so
    idleness earns no credit; time taken while the other waited stays a debt.
    """

    training_seconds: float = 0.0
    sampling_seconds: float = 0.0

    def training_is_next(self, training: bool, sampling: bool) -> bool:
        if training and sampling:
            return self.training_seconds <= self.sampling_seconds
        if training:
            self.sampling_seconds = max(self.sampling_seconds, self.training_seconds)
        else:
            self.training_seconds = max(self.training_seconds, self.sampling_seconds)
        return training

    def spent(self, training: bool, seconds: float) -> None:
        if training:
            self.training_seconds += seconds
        else:
            self.sampling_seconds += seconds


@dataclass
class Backoff:
    """A worker that served for a while is restarted at once, one that keeps dying ever later (seconds)."""

    first: float = 1.0
    limit: float = 60.0
    steady_after: float = 60.0
    _started_at: float = 0.0
    _num_quick_deaths: int = 0

    def started(self) -> None:
        self._started_at = time.monotonic()

    def next_delay(self) -> float:
        if time.monotonic() - self._started_at > self.steady_after + self._delay():
            self._num_quick_deaths = 0
        delay = self._delay()
        self._num_quick_deaths += 1
        return delay

    def _delay(self) -> float:
        return min(self.limit, self.first * 2 ** (self._num_quick_deaths - 1)) if self._num_quick_deaths else 0.0


def _as_failure(error: Exception) -> Failure:
    if isinstance(error, OperationError):
        return Failure(error.message, error.category)
    if not isinstance(error, WorkerError):
        logger.error("a call to the worker failed", exc_info=error)
    return Failure(f"the worker failed: {error}", "server")


def _settle(future: "asyncio.Future[Any]", answer: object) -> None:
    if future.done():
        return
    if isinstance(answer, Failure):
        future.set_exception(OperationError(answer.message, answer.category))
    else:
        future.set_result(answer)

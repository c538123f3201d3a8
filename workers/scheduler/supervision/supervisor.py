"""Starts the ranks of a group, makes its calls, and restarts the ranks when one dies."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ....schemas.errors import OperationError
from ...pools.base import PlacementError, Pool, WorkerDied, WorkerError
from ...protocol.calls import Failure, ModelInfo
from ...protocol.methods import DEVICE_NAME, INFO, OFFLOAD, RESET, Method
from ...protocol.timeouts import CallTimeouts
from ...protocol.worker_config import WorkerConfig
from ...resources.machine import available_bytes, gigabytes
from .backoff import RestartBackoff, backoff
from .device_sharing import DeviceLease
from .footprint import loaded_bytes, planned_bytes
from .ranks import Ranks

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Pause before the next attempt to place the ranks. Nothing died, so there is no backoff.
_PLACE_SECONDS = 2.0
# Of loading at the start; the retries follow pauses of 1, 2 and 4 seconds.
_MAX_TRIES = 4


class Supervisor:
    """Owns the ranks of a group and its lease of shared devices."""

    info: ModelInfo
    """The loaded model."""

    def __init__(
        self,
        name: str,
        config: WorkerConfig,
        new_pool: Callable[[WorkerConfig], Pool],
        device: DeviceLease,
        wake: Callable[[], None],
        takes_turns: bool,
    ) -> None:
        """Builds the supervisor; `start` loads the model.

        Args:
            wake: called when a rank dies.
            takes_turns: whether the group shares its devices with others.
        """
        self.num_deaths = 0
        """Deaths of the workers so far."""
        self.is_restarting = False
        """True from a death until the new workers are ready."""
        self.placement_error: PlacementError | None = None
        """The reason why the ranks cannot be started now."""
        self.timeouts = CallTimeouts(config)
        self.device = device
        self.backoff = RestartBackoff()
        """Delays restarts."""
        self._name = name
        self._config = config
        self._new_pool = new_pool
        self._wake = wake
        self._takes_turns = takes_turns
        self._ranks: Ranks | None = None

    @property
    def ranks(self) -> Ranks:
        assert self._ranks is not None, "calls are made only after start()"
        return self._ranks

    @property
    def pids(self) -> list[int]:
        return self._ranks.pool.pids if self._ranks else []

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Loads the model.

        Raises:
            ValueError: it does not load; the message says why.
        """
        source, size = self._config.model.source, loaded_bytes(self._config)
        on_progress(f"loading {self._name} from {source}{f' ({gigabytes(size)})' if size else ''} ...")
        started = time.monotonic()
        await self._load(on_progress)
        seconds = time.monotonic() - started
        place = f"{self.info.dtype} on {self.info.device}, {self._processes()}"
        on_progress(f"{self._name} ready in {seconds:.1f} s: {place}")

    async def _load(self, on_progress: Callable[[str], None]) -> None:
        name, source = self._name, self._config.model.source
        for number in range(1, _MAX_TRIES + 1):
            try:
                await self._open_or_close()
                return
            except (WorkerDied, EOFError, ConnectionError) as error:
                reason = _failure_reason(error, self._config)
                if number == _MAX_TRIES:
                    raise ValueError(
                        f"base model {name} does not load from {source}, tried {number} times: {reason}"
                    ) from error
                seconds = backoff(number, first=1.0)
                on_progress(f"{name} did not load: {reason}; trying again in {seconds:.0f} s")
                await asyncio.sleep(seconds)
            except (WorkerError, OSError) as error:
                raise ValueError(f"base model {name} does not load from {source}: {error}") from error

    async def close(self) -> None:
        if self._ranks is not None:
            await self._ranks.close()

    async def restart(self) -> None:
        """Restarts the ranks after a death, however often it takes."""
        self.num_deaths += 1
        self.is_restarting = True
        await self.ranks.close()
        self.device.release()
        while not await self._try_to_open():
            pass
        self.is_restarting = False

    async def answer_or_failure(self, call: Awaitable[T]) -> T | Failure:
        """Returns the ranks' answer, or a Failure if the call failed. Raises WorkerDied."""
        try:
            return await call
        except WorkerDied:
            raise
        except OperationError as error:
            return Failure.of(error)
        except Exception as error:
            if not isinstance(error, WorkerError):
                logger.error("a call to the worker failed", exc_info=error)
            return Failure(f"the worker failed: {error}", "server")

    async def leave_device(self) -> None:
        """Offloads the group and releases its devices; if offloading fails, they are shared with the next group."""
        answer = await self.answer_or_failure(self._call(OFFLOAD))
        if isinstance(answer, Failure):
            logger.warning("%s does not leave its device: %s", self._name, answer.message)
        else:
            self.device.record_move(answer)
            self.timeouts.record_move(answer)
        self.device.release()

    async def _call(self, method: Method[T]) -> T:
        return await self.ranks.call(method.name, hang_seconds=self.timeouts.for_method(method))

    async def _try_to_open(self) -> bool:
        await asyncio.sleep(_PLACE_SECONDS if self.placement_error else self.backoff.next_delay())
        try:
            await self._open_or_close()
        except PlacementError as error:
            if str(error) != str(self.placement_error):
                logger.error("base model %s cannot be placed: %s", self._name, error)
            self.placement_error = error
            return False
        except (WorkerDied, WorkerError, ValueError, OSError, EOFError, RuntimeError, MemoryError) as error:
            # The last four: the system has no process, file, thread or memory for us at the moment.
            logger.error("base model %s does not restart: %s", self._name, _failure_reason(error, self._config))
            self.placement_error = None
            return False
        self.placement_error = None
        logger.warning("base model %s is back: %s", self._name, self._processes())
        return True

    async def _open_or_close(self) -> None:
        try:
            await self._open()
        except BaseException:
            # A rank may have died between its start and its first answer, still holding its resources.
            await self.close()
            self.device.release()
            raise

    async def _open(self) -> None:
        await self.device.acquire()
        config = self._config
        ranks = self._ranks = Ranks(self._new_pool(config), config.parallel, config.shared_directories)
        loading_seconds = self.timeouts.for_start(is_restart=self.num_deaths > 0)
        await ranks.start(loading_seconds, self.timeouts.for_method(RESET))
        ranks.pool.death.add_done_callback(lambda _: self._wake())
        self.backoff.started()
        self.info = await self._call(INFO)
        if self._takes_turns:
            await self._register_devices(ranks)

    async def _register_devices(self, ranks: Ranks) -> None:
        """Sets the lease's devices. The ranks loaded as if alone there, so the group leaves and waits for its turn."""
        hang_seconds = self.timeouts.for_method(DEVICE_NAME)
        devices = frozenset(await ranks.call_each(DEVICE_NAME.name, hang_seconds=hang_seconds))
        if devices != self.device.devices:
            await self.leave_device()
            self.device.devices = devices

    def _processes(self) -> str:
        pids = ", ".join(map(str, self.pids))
        return f"{self._config.parallel}, processes {pids}" if "," in pids else f"process {pids}"


def _failure_reason(error: Exception, config: WorkerConfig) -> str:
    """Explains the failure for the operator who can do something about it."""
    words = str(error) or type(error).__name__
    if isinstance(error, EOFError | OSError):
        words = f"the process that starts workers ended while it started one ({words})"
    elif "SIGKILL" not in words:
        return words
    planned, available = planned_bytes(config), available_bytes()
    needs = f"needs {gigabytes(planned)} of memory for its weights" if planned else "needs memory"
    there = f", and {gigabytes(available)} is available now" if available is not None else ""
    return (
        f"{words}: unless someone sent that signal, the kernel's out-of-memory killer did; loading it {needs}{there}: "
        "free memory, serve fewer or smaller models, or load them with --dtype bfloat16"
    )

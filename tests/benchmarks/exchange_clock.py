"""A worker that clocks how long it is in exchanges with other ranks: what they take, and what it waits for the others.

Of an exchange that goes on beside computing, only what is waited for in the end counts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainhouse.workers.parallel.mesh import Arriving, Mesh, Team
from trainhouse.workers.protocol.config import WorkerConfig
from trainhouse.workers.worker.worker import Worker

CLOCKED = f"{__name__}:ClockedWorker"

# None of them calls another one.
_EXCHANGES = {
    Team: ("sum", "joining", "summed_part", "exchanged", "passed_on", "from_first"),
    Arriving: ("wait",),
    Mesh: ("exchange",),
}


@dataclass(frozen=True)
class Clocks:
    """Seconds since the start: in exchanges, and of processors that all threads of the rank took."""

    exchanging: float
    cpu: float


class ClockedWorker(Worker):
    """Alone in its process, whose exchanges are clocked from now on."""

    def __init__(self, config: WorkerConfig) -> None:
        self._exchange_seconds = 0.0
        for owner, names in _EXCHANGES.items():
            for name in names:
                setattr(owner, name, self._clocked(getattr(owner, name)))
        super().__init__(config)

    def clocks(self) -> Clocks:
        return Clocks(self._exchange_seconds, time.process_time())

    def _clocked(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return exchange(*arguments, **named)
            finally:
                self._exchange_seconds += time.perf_counter() - started

        return clocked

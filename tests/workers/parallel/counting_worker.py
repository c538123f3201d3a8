"""A worker that counts its exchanges with other ranks."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from trainhouse.workers.parallel.mesh import Team
from trainhouse.workers.protocol.worker_config import WorkerConfig
from trainhouse.workers.worker.worker import Worker

COUNTING = "trainhouse.tests.workers.parallel.counting_worker:CountingWorker"

# None of them calls another one.
EXCHANGES = (
    *("all_gather_object", "all_reduce", "start_all_gather", "gather_at_first", "reduce_scatter"),
    *("all_to_all", "start_ring_shift", "broadcast"),
)


class CountingWorker(Worker):
    """Must be alone in its process."""

    def __init__(self, config: WorkerConfig) -> None:
        self._num_exchanges: Counter[str] = Counter()
        for name in EXCHANGES:
            setattr(Team, name, self._counted(getattr(Team, name), name.removeprefix("start_")))
        super().__init__(config)

    def num_exchanges(self) -> Counter[str]:
        """Returns the number since the start, by kind."""
        return self._num_exchanges

    def _counted(self, exchange: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def counted(team: Team, *arguments: Any, **named: Any) -> Any:
            self._num_exchanges[kind] += team.size > 1
            return exchange(team, *arguments, **named)

        return counted

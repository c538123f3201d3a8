"""A worker that counts the bytes that it sends to other ranks in a pass."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from trainhouse.workers.parallel.mesh import Team
from trainhouse.workers.protocol.calls import PartAnswer, Pass
from trainhouse.workers.protocol.worker_config import WorkerConfig
from trainhouse.workers.worker.worker import Worker

SENDING = "trainhouse.tests.workers.parallel.sending_worker:SendingWorker"

# How often a rank of n sends its tensor. None of them calls another one.
_SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "start_all_gather": lambda n: n - 1,
    "reduce": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "start_ring_shift": lambda n: 1,
}


class SendingWorker(Worker):
    """Must be alone in its process."""

    def __init__(self, config: WorkerConfig) -> None:
        self._sent = 0.0
        for name, times in _SENT.items():
            setattr(Team, name, self._counted(getattr(Team, name), times))
        super().__init__(config)

    def run_pass(self, work: Pass) -> tuple[PartAnswer, ...]:
        self._sent = 0.0
        return super().run_pass(work)

    def sent(self) -> float:
        """Returns the bytes that were sent in the last pass."""
        return self._sent

    def _counted(self, exchange: Callable[..., Any], times: Callable[[int], float]) -> Callable[..., Any]:
        def counted(team: Team, tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            self._sent += times(team.size) * tensor.nbytes if team.size > 1 else 0
            return exchange(team, tensor, *arguments, **named)

        return counted

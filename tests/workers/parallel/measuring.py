"""Ranks of a layout whose passes are measured."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from trainhouse.schemas.models import LoraConfig, Role, TrainingConfig
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.pools.base import PoolSpec
from trainhouse.workers.pools.local import LocalPool
from trainhouse.workers.protocol.calls import OperationPart, RunSpec
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.scheduler.supervision.ranks import Ranks

HANG_SECONDS = 600.0
LORA = LoraConfig(rank=8, seed=0, train_unembed=False, expert_factors="shared")
LENGTH, VOCAB = 512, 512
MEASURING = "trainhouse.tests.workers.parallel.measuring_worker:MeasuringWorker"
ACCOUNTING = "trainhouse.tests.workers.parallel.measuring_worker:AccountingWorker"


@dataclass
class Measured:
    """The ranks of a layout, called from synchronous tests. runs: the policies that share each pass."""

    runner: asyncio.Runner
    pool: LocalPool
    ranks: Ranks
    spec: ParallelSpec
    num_operations: int = 0
    runs: tuple[str, ...] = ("run",)

    def of_each(self, method: str, *arguments: object) -> list[Any]:
        return self.runner.run(self.pool.broadcast(method, *arguments, hang_seconds=HANG_SECONDS))

    def pass_over(self, tokens: int, length: int = LENGTH, role: Role = "policy") -> None:
        """tokens: of the sequences that a rank takes. length: of each of them. role: of the run."""
        random = np.random.default_rng(0)
        data = tuple(_datum(random, length, role) for _ in range(self.spec.num_data_shares * tokens // length))
        loss, runs = "value_mse" if role == "critic" else "cross_entropy", self.runs if role == "policy" else (role,)
        parts = []
        for number, run_id in enumerate(runs):
            self.num_operations += 1
            own = data[number :: len(runs)]
            request = ForwardBackwardRequest(run_id, 1, own, loss, forward_only=role == "reference")
            parts.append(OperationPart(self.num_operations, request))
        for output in self.runner.run(self.ranks.run_pass(tuple(parts), HANG_SECONDS)):
            assert isinstance(output, ForwardBackwardOutput), output

    def peak(self, tokens: int, length: int = LENGTH, role: Role = "policy") -> int:
        self.pass_over(tokens, length, role)
        return max(self.of_each("peak"))


def _datum(random: np.random.Generator, length: int, role: Role) -> Datum:
    row = random.integers(0, VOCAB, length + 1)
    if role == "critic":
        return Datum(row[:-1].astype(np.int32), {"returns": np.ones(length, np.float32)})
    return Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": np.ones(length, np.float32)})


@contextmanager
def measured(
    model: Path, spec: ParallelSpec, training: TrainingConfig = LORA, worker: str = MEASURING, **options: Any
) -> Iterator[Measured]:
    """Creates a run and makes its first pass, so that one-time allocations are done."""
    config = WorkerConfig(ServedModel("m", str(model)), device="cpu", threads=1, parallel=spec, **options)
    configs = tuple(replace(config, rank=rank) for rank in range(spec.num_ranks))
    with asyncio.Runner() as runner:
        pool = LocalPool(PoolSpec(worker, configs))
        ranks = Ranks(pool, spec)
        runner.run(ranks.start())
        try:
            where = Measured(runner, pool, ranks, spec)
            where.of_each("create_run", RunSpec("run", training))
            where.pass_over(LENGTH)
            yield where
        finally:
            runner.run(ranks.close())

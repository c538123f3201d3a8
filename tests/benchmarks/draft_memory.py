"""Drafts in processes of their own that say what their passes take: how far each raises its process's peak of resident
memory, and how long it runs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trainhouse.schemas.models import Algorithm, DraftConfig
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from trainhouse.workers.protocol.verbs import Pass, RunSpec
from trainhouse.workers.training.progress import Answer
from trainhouse.workers.worker.worker import Worker

from ..workers.parallel.training import Layout, layout
from .resident import peak_bytes, resident_bytes, restart_peak

HANG_SECONDS = 600.0
# A short pass makes what is made once.
_WARM_UP = 64
# Tokens are below it.
_SMALLEST_VOCAB = 2048


@dataclass(frozen=True)
class Cost:
    """growth: bytes of resident memory above those before the pass, at most. seconds: of the pass."""

    growth: int
    seconds: float


class CostingWorker(Worker):
    def run_pass(self, work: Pass) -> tuple[Answer, ...]:
        before, started = resident_bytes(), time.perf_counter()
        restart_peak()
        answers = super().run_pass(work)
        self._cost = Cost(peak_bytes() - before, time.perf_counter() - started)
        return answers

    def pass_cost(self) -> Cost:
        """Of the last one."""
        return self._cost


class Student:
    """A draft in fresh processes. Of one process the first long pass alone tells its peak: the allocator keeps what it
    took."""

    def __init__(self, where: Layout, draft: DraftConfig) -> None:
        self.where = where
        where.call("create_run", RunSpec("draft", draft, "draft"))
        if draft.draft_vocab_size is not None:
            where.call("set_vocabulary", "draft", np.arange(draft.draft_vocab_size))
        self.cost(lesson(draft.algorithm, _WARM_UP))

    def cost(self, request: ForwardBackwardRequest) -> Cost:
        """Of the ranks the most of each."""
        (output,) = self.where.run_pass(request)
        assert isinstance(output, ForwardBackwardOutput), output
        costs = self.where.answers("pass_cost")
        return Cost(max(each.growth for each in costs), max(each.seconds for each in costs))


@contextmanager
def student(
    model: Path, scratch: Path, draft: DraftConfig, spec: ParallelSpec = SINGLE, **knobs: Any
) -> Iterator[Student]:
    """knobs: of WorkerConfig."""
    worker = f"{__name__}:{CostingWorker.__name__}"
    with layout(model, spec, scratch, worker, hang_seconds=HANG_SECONDS, **knobs) as where:
        yield Student(where, draft)


def lesson(algorithm: Algorithm, *lengths: int, ttt_length: int = 1) -> ForwardBackwardRequest:
    """Over sequences of random tokens."""
    random = np.random.default_rng(sum(lengths))
    data = [Datum(random.integers(3, _SMALLEST_VOCAB, length).astype(np.int32), {}) for length in lengths]
    options = {"ttt_length": ttt_length} if algorithm == "eagle3" else {"seed": 1}
    return ForwardBackwardRequest("draft", 1, tuple(data), algorithm, options)

"""Ranks of a layout whose passes are measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from trainhouse.schemas.models import LoraConfig, Role, TrainingConfig
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.protocol.calls import RunSpec
from trainhouse.workers.protocol.parallel_spec import ParallelSpec

from .rank_bytes import PassBytes, RunBytes
from .training import Layout, layout

HANG_SECONDS = 600.0
LORA = LoraConfig(rank=8, seed=0, train_unembed=False, expert_factors="shared")
LENGTH, VOCAB = 512, 512


class Measured(Layout):
    """runs: the policies that share each pass. counts: which bytes."""

    runs: tuple[str, ...] = ("run",)
    counts: type[PassBytes] | type[RunBytes] = PassBytes

    def pass_over(self, tokens: int, length: int = LENGTH, role: Role = "policy") -> None:
        """tokens: of the sequences that a rank takes. length: of each of them. role: of the run."""
        random = np.random.default_rng(0)
        data = tuple(_datum(random, length, role) for _ in range(self.spec.num_data_shares * tokens // length))
        loss, runs = "value_mse" if role == "critic" else "cross_entropy", self.runs if role == "policy" else (role,)
        requests = [
            ForwardBackwardRequest(run_id, 1, data[number :: len(runs)], loss, forward_only=role == "reference")
            for number, run_id in enumerate(runs)
        ]
        for output in self.run_pass(*requests):
            assert isinstance(output, ForwardBackwardOutput), output

    def peak(self, tokens: int, length: int = LENGTH, role: Role = "policy") -> int:
        self.pass_over(tokens, length, role)
        return max(self.probe(self.counts.peak))


def _datum(random: np.random.Generator, length: int, role: Role) -> Datum:
    row = random.integers(0, VOCAB, length + 1)
    if role == "critic":
        return Datum(row[:-1].astype(np.int32), {"returns": np.ones(length, np.float32)})
    return Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": np.ones(length, np.float32)})


@contextmanager
def measured(
    model: Path,
    spec: ParallelSpec,
    training: TrainingConfig = LORA,
    counts: type[PassBytes] | type[RunBytes] = PassBytes,
    **options: Any,
) -> Iterator[Measured]:
    """Creates a run and makes its first pass, so that one-time allocations are done."""
    options = {"device": "cpu", "kv_cache_bytes": None, "hang_seconds": HANG_SECONDS} | options
    with layout(model, spec, model, kind=Measured, **options) as where:
        where.counts = counts
        where.probe(counts)
        where.call("create_run", RunSpec("run", training))
        where.pass_over(LENGTH)
        yield where

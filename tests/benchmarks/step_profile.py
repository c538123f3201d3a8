"""Where a training step's CPU time goes: the worker's own step against the hand-written loop, in one process.

`python -m trainhouse.tests.benchmarks.step_profile` prints, per batch of `bench.py`, the CPU milliseconds of a step of
both sides on one thread (medians of alternating rounds; CPU time, so a busy machine disturbs little); `--table` adds
torch's profile of ours by operator.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ...schemas.models import LoraConfig
from ...schemas.training import AdamParams, Datum, ForwardBackwardRequest
from ...workers.config import ServedModel, WorkerConfig
from ...workers.verbs import Failure, Part, Pass, RunSpec, Step
from ...workers.worker import Worker
from ..tiny import tiny_model
from .local_loop import LocalLoop, padded
from .workload import MODEL, RANK, SHAPE, batches, num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="torch's profile of our step by operator")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model("qwen3", Path(scratch) / "model", **SHAPE)
        worker = Worker(WorkerConfig(ServedModel(MODEL, str(model)), device="cpu", threads=options.threads))
        worker.create_run(RunSpec("run", LoraConfig(rank=RANK, seed=0, train_unembed=False)))
        local = LocalLoop(model, RANK)
        for name, rows in batches().items():
            ours, theirs = remote_step(worker, rows), local_step(local, rows)
            report(name, num_tokens(rows), ours, theirs, options.rounds)
            if options.table:
                print(profile(ours))


def remote_step(worker: Worker, rows: list[list[int]]) -> Callable[[], object]:
    data = [
        Datum(
            np.asarray(row[:-1]),
            {"target_tokens": np.asarray(row[1:]), "weights": np.ones(len(row) - 1, dtype=np.float32)},
        )
        for row in rows
    ]
    request = ForwardBackwardRequest("run", 1, tuple(data), "cross_entropy")

    def step() -> None:
        (output,) = worker.run_pass(Pass((Part(0, request),)))
        (metrics,) = worker.apply_steps((Step("run", AdamParams(learning_rate=1e-4)),))
        assert not isinstance(output, Failure) and not isinstance(metrics, Failure), (output, metrics)

    return step


def local_step(loop: LocalLoop, rows: list[list[int]]) -> Callable[[], object]:
    batch = padded(rows)
    return lambda: loop.step(*batch)


def report(name: str, tokens: int, ours: Callable, theirs: Callable, rounds: int) -> None:
    ours(), theirs()
    pairs = [(cpu_milliseconds(ours), cpu_milliseconds(theirs)) for _ in range(rounds)]
    own, their = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"{name:<14}{tokens:>6} tokens  worker {own:7.1f} ms  local loop {their:7.1f} ms  {ratio:5.2f}x", flush=True)


def cpu_milliseconds(step: Callable[[], object]) -> float:
    started = time.process_time()
    step()
    return (time.process_time() - started) * 1000


def profile(step: Callable[[], object]) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        step()
    return recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=40)


if __name__ == "__main__":
    main()

"""Where a training step's processor time goes: the worker's own step against the hand-written loop, without a server.

`python -m trainhouse.tests.benchmarks.step_profile` prints the CPU milliseconds of a step of both on one thread, for
each batch of `make bench`: medians and minima of alternating rounds. CPU time says more than the clock on a machine
that others use too. `--table` adds torch's profile of ours.

Each side runs in a process of its own, this module again: the worker tunes the allocator of its process.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ...schemas.models import FullConfig, LoraConfig
from ...schemas.training import AdamParams, Datum, ForwardBackwardRequest
from ...workers.protocol.config import ServedModel, WorkerConfig
from ...workers.protocol.verbs import Failure, Part, Pass, RunSpec, Step
from ...workers.worker.worker import Worker
from ..tiny import tiny_model
from .child import Child, child
from .local_loop import LocalLoop, padded
from .workload import MODEL, RANK, SHAPE, Rows, batches, num_tokens

TrainStep = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--training", choices=["lora", "full"], default="lora", help="full: of all weights")
    parser.add_argument("--table", action="store_true", help="torch's profile of our step by operator")
    parser.add_argument("--side", choices=["worker", "local"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side)
        return
    with (
        tempfile.TemporaryDirectory() as scratch,
        child("step_profile", "--side", "worker") as worker,
        child("step_profile", "--side", "local") as local,
    ):
        model = tiny_model("qwen3", Path(scratch) / "model", **SHAPE)
        for side in (worker, local):
            side.ask({"model": str(model), "threads": options.threads, "training": options.training})
        for name, rows in batches().items():
            report(name, num_tokens(rows), worker, local, options.rounds)
            if options.table:
                print(worker.ask({"batch": name, "table": True}))


def report(name: str, tokens: int, worker: Child, local: Child, rounds: int) -> None:
    asked = {"batch": name, "table": False}
    worker.ask(asked), local.ask(asked)
    ours, theirs = zip(*[(worker.ask(asked), local.ask(asked)) for _ in range(rounds)], strict=True)
    for what, of in (("median", statistics.median), ("least", min)):
        print(
            f"{name:<14}{tokens:>5} tokens  {what:<7} worker {of(ours):7.1f} ms  local loop {of(theirs):7.1f} ms"
            f"  {of(theirs) / of(ours):5.2f}x",
            flush=True,
        )


def serve(side: str) -> None:
    """One side: answers {"batch", "table"} by the milliseconds of a step, or by its profile."""
    setup = json.loads(sys.stdin.readline())
    torch.set_num_threads(setup["threads"])
    make_step = worker_steps(setup) if side == "worker" else local_steps(setup)
    steps = {name: make_step(rows) for name, rows in batches().items()}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        step = steps[asked["batch"]]
        print(json.dumps(profile(step) if asked["table"] else cpu_milliseconds(step)), flush=True)


def worker_steps(setup: dict) -> Callable[[Rows], TrainStep]:
    worker = Worker(WorkerConfig(ServedModel(MODEL, setup["model"]), device="cpu", threads=setup["threads"]))
    lora = LoraConfig(rank=RANK, seed=0, train_unembed=False)
    worker.create_run(RunSpec("run", FullConfig() if setup["training"] == "full" else lora))

    def make(rows: Rows) -> TrainStep:
        request = ForwardBackwardRequest("run", 1, tuple(map(datum, rows)), "cross_entropy")

        def step() -> None:
            (output,) = worker.run_pass(Pass((Part(0, request),)))
            (metrics,) = worker.apply_steps((Step("run", AdamParams(learning_rate=1e-4)),))
            assert not isinstance(output, Failure) and not isinstance(metrics, Failure), (output, metrics)

        return step

    return make


def datum(row: list[int]) -> Datum:
    weights = np.ones(len(row) - 1, dtype=np.float32)
    return Datum(np.asarray(row[:-1]), {"target_tokens": np.asarray(row[1:]), "weights": weights})


def local_steps(setup: dict) -> Callable[[Rows], TrainStep]:
    loop = LocalLoop(Path(setup["model"]), None if setup["training"] == "full" else RANK)

    def make(rows: Rows) -> TrainStep:
        batch = padded(rows)
        return lambda: loop.step(*batch)

    return make


def cpu_milliseconds(step: TrainStep) -> float:
    started = time.process_time()
    step()
    return (time.process_time() - started) * 1000


def profile(step: TrainStep) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as recorded:
        step()
    averages = recorded.key_averages(group_by_input_shape=True)
    return averages.table(
        sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=40, max_shapes_column_width=60
    )


if __name__ == "__main__":
    main()

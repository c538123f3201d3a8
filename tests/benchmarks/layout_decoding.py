"""A step of decoding under layouts against that of one rank, by the slices in which the dispatch has ranks sample."""

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from ...schemas.sampling import SamplingParams
from ...workers.protocol.parallel_spec import ParallelSpec
from ...workers.protocol.verbs import RunSpec, SampleJob
from ..tiny import tiny_model
from ..workers.parallel.training import Layout, layout
from .exchange_clock import CLOCKED
from .layout_steps import LORA, run_step
from .report import Line, Row, Section
from .workload import SHAPE, rows

SAMPLES, PROMPT, LENGTH = 4, 64, 64
MOST_TIMES = 3

_seeds = count()


@dataclass(frozen=True)
class Side:
    """rows: that decode at once, on all ranks together."""

    layout: str
    rows: int = 32

    @property
    def name(self) -> str:
        return f"{'one rank' if self.layout == 'single' else self.layout}, {self.rows} rows"


@dataclass(frozen=True)
class TimedStep:
    """Seconds, and those of processors that all ranks took together."""

    seconds: float
    cpu: float


ONE = Side("single")
# Along tp ranks decode the same rows, along fsdp each its own.
SIDES = (ONE, Side("tp=2"), Side("fsdp=2"), Side("fsdp=2", 64))


def layout_decoding(_: Path, scratch: Path, pool: str, rounds: int) -> Section:
    model = tiny_model("qwen3", scratch / "decoding", **SHAPE)
    with ExitStack() as stack:
        ranks = {name: _started(name, model, scratch, stack) for name in dict.fromkeys(each.layout for each in SIDES)}
        steps: dict[Side, list[TimedStep]] = {side: [] for side in SIDES}
        for _ in range(1 + rounds):
            for side in SIDES:
                steps[side].append(decoded(ranks[side.layout], side.rows))
    # The first round warms up.
    return _section({side: of_side[1:] for side, of_side in steps.items()}, rounds)


def _started(name: str, model: Path, scratch: Path, stack: ExitStack) -> Layout:
    """With an adapter that was trained for a step, as a sampler."""
    # All prompts are run at once, so that all rows decode from then on.
    knobs = {"kv_cache_bytes": 1 << 28, "prefill_chunk_tokens": 64 * PROMPT}
    where = stack.enter_context(layout(model, ParallelSpec.parse(name), scratch, CLOCKED, **knobs))
    where.call("create_run", RunSpec("run", LORA))
    run_step(where, rows([PROMPT] * SAMPLES))
    where.call("copy_adapter", "run", "sampler")
    return where


def decoded(where: Layout, num_rows: int) -> TimedStep:
    """The steps behind the prompts' own, on average."""
    result = where.run_slice(_jobs(num_rows), 0.0)
    (done,) = {len(part.tokens) for parts in result.progress.values() for part in parts}
    assert sum(map(len, result.progress.values())) == num_rows, "all rows begin in the first slice"
    before, finished, started = where.answers("clocks"), {}, time.perf_counter()
    while result.num_active:
        result = where.run_slice()
        finished |= result.finished
    seconds, after = time.perf_counter() - started, where.answers("clocks")
    assert all(len(sequence.tokens) == LENGTH for answer in finished.values() for sequence in answer.sequences)
    cpu = sum(each.cpu for each in after) - sum(each.cpu for each in before)
    return TimedStep(seconds / (LENGTH - done), cpu / (LENGTH - done))


def _jobs(num_rows: int) -> tuple[SampleJob, ...]:
    """Of prompts that no sampler has seen."""
    prompts = [row[:PROMPT] for row in rows([PROMPT] * (num_rows // SAMPLES), seed=next(_seeds))]
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=0)
    return tuple(
        SampleJob(f"job-{i}", "sampler", np.array(each, np.int32), params, (), (), SAMPLES, streams=True)
        for i, each in enumerate(prompts)
    )


def _section(steps: dict[Side, list[TimedStep]], rounds: int) -> Section:
    times = {
        side: [mine.seconds / one.seconds for mine, one in zip(steps[side], steps[ONE], strict=True)] for side in SIDES
    }
    table: list[Row] = [
        {
            "a step of decoding": side.name,
            "ms": 1000 * statistics.median(step.seconds for step in steps[side]),
            "times one rank's": statistics.median(times[side]),
            "lowest round": min(times[side]),
            "highest round": max(times[side]),
            "CPU ms of all ranks": 1000 * statistics.median(step.cpu for step in steps[side]),
        }
        for side in SIDES
    ]
    lines = [
        Line(
            f"a step of decoding, {side.name}: times one rank's", statistics.median(times[side]), "at most", MOST_TIMES
        )
        for side in SIDES
        if side is not ONE and side.rows == ONE.rows
    ]
    notes = [
        f"Medians of {rounds} rounds, layouts in turn; a thread for each rank. {SAMPLES} samples of {LENGTH} tokens to",
        f"each prompt of {PROMPT}, by an adapter of rank {LORA.rank}: the mean of all steps behind the prompts' own,",
        "in slices of 50 ms, for which ranks along fsdp gather all layers. Along tp both ranks decode the same rows,",
        "along fsdp each has half of them.",
    ]
    return Section("A step of decoding", table, lines, notes)

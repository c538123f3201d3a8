"""Layouts of several ranks against one rank: training steps and their exchanges, the memory of each rank against what
is planned, and decode steps.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...schemas.sampling import SamplingParams
from ...schemas.training import AdamParams, ForwardBackwardOutput
from ...workers.planner.estimate import MemoryEstimate, estimate
from ...workers.planner.workload import Workload
from ...workers.protocol.calls import OptimizerStep, RunSpec, SampleJob
from ...workers.protocol.parallel_spec import SINGLE, ParallelSpec
from ...workers.protocol.worker_config import ServedModel, ZeroStage
from ...workers.shapes.model_shape import ModelShape, read_model
from ..tiny import tiny_model
from ..workers.parallel.exchanges import Exchanges
from ..workers.parallel.training import Layout, close, layout
from .harness import (
    LORA,
    RANK,
    SHAPE,
    Line,
    Row,
    Rows,
    Section,
    Setup,
    batches,
    in_turn,
    median_ratio,
    prompts,
    ratios,
    request,
    rows,
    spread,
)
from .processes.workers import METERED, ExchangeClock, Loading, MeteredPass

BATCHES = ("16x128", "4x512")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
ADAM = AdamParams(learning_rate=1e-4)

T = TypeVar("T")


@dataclass(frozen=True)
class Spent:
    """Seconds that a call of the ranks took. exchanging: the mean of the ranks. cpu: of all ranks together."""

    seconds: float
    exchanging: float
    cpu: float
    num_exchanges: float


def spent(where: Layout, work: Callable[[], T]) -> tuple[T, Spent]:
    """Returns the work's result as well."""
    before, (sent_before, *_) = where.probe(ExchangeClock.read), where.probe(Exchanges.num)
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    after, (sent, *_) = where.probe(ExchangeClock.read), where.probe(Exchanges.num)
    return result, Spent(
        seconds=seconds,
        exchanging=(sum(each.exchanging for each in after) - sum(each.exchanging for each in before)) / len(after),
        cpu=sum(each.cpu for each in after) - sum(each.cpu for each in before),
        num_exchanges=(sent - sent_before).total(),
    )


def run_step(where: Layout, token_rows: Rows) -> float:
    """Runs a pass and an optimizer step; returns the loss."""
    (output,) = where.run_pass(request("run", token_rows))
    (metrics,) = where.call("apply_steps", (OptimizerStep("run", ADAM),))
    assert isinstance(output, ForwardBackwardOutput) and isinstance(metrics, dict), (output, metrics)
    return output.metrics["loss:sum"]


def _started(stack: ExitStack, setup: Setup, model: Path, name: str, **options: Any) -> Layout:
    """Starts ranks that have a run and clock their exchanges."""
    where = stack.enter_context(layout(model, ParallelSpec.parse(name), setup.scratch, **options))
    where.call("create_run", RunSpec("run", LORA))
    return where


# Steps


@dataclass(frozen=True)
class Side:
    """threads: of each rank."""

    layout: str
    threads: int = 1
    zero_stage: ZeroStage = "3"

    @property
    def name(self) -> str:
        name = "one rank" if self.layout == "single" else self.layout
        name += f", {self.threads} threads" if self.threads > 1 else ""
        return name + (f", ZeRO-{self.zero_stage}" if self.layout.startswith("fsdp") else "")


ONE = Side("single")
# With a thread for each core, one rank has what two ranks have.
THREADED = Side("single", threads=max(2, os.cpu_count() or 1))
ZERO_2 = Side("fsdp=2", zero_stage="2")
SIDES = {
    "qwen3": (ONE, THREADED, Side("replicas=2"), Side("fsdp=2"), ZERO_2, Side("tp=2"), Side("sp=2")),
    "qwen3_moe": (ONE, THREADED, Side("ep=2")),
}


def layout_steps(setup: Setup) -> Section:
    table = [row for kind in SIDES for row in _step_rows(kind, setup)]
    notes = [
        f"A forward_backward and an optim_step of a run of rank {RANK}, from the call of the ranks to their answer;",
        f"medians of {setup.rounds} rounds, all layouts of a model in turn. A rank has one thread where no more are",
        "named. In exchanges: the share of a step that a rank spends in exchanges, waiting for the other rank",
        "included, the mean of both; what arrives while it computes does not count. CPU: of all ranks together.",
        "qwen3_moe: "
        f"{EXPERTS['num_experts']} experts of {EXPERTS['moe_intermediate_size']} features, of which a token takes "
        f"{EXPERTS['num_experts_per_tok']}, adapted as well.",
    ]
    return Section("Steps of several ranks", table, (), notes)


def _step_rows(kind: str, setup: Setup) -> Iterator[Row]:
    model = tiny_model(kind, setup.scratch / f"{kind}-steps", **(SHAPE | (EXPERTS if kind == "qwen3_moe" else {})))
    with ExitStack() as stack:
        ranks = {
            side: _started(stack, setup, model, side.layout, threads=side.threads, zero_stage=side.zero_stage)
            for side in SIDES[kind]
        }
        for batch in BATCHES:
            steps = _steps(ranks, batches()[batch], setup.rounds)
            yield from (_step_row(kind, batch, side, steps[side], steps[ONE]) for side in ranks)


def _steps(ranks: Mapping[Side, Layout], token_rows: Rows, rounds: int) -> dict[Side, list[Spent]]:
    def side(where: Layout) -> Callable[[], tuple[float, Spent]]:
        return lambda: spent(where, lambda: run_step(where, token_rows))

    found = in_turn({each: side(where) for each, where in ranks.items()}, 1 + rounds)
    for each, steps in found.items():
        assert close([steps[0][0]], [found[ONE][0][0]]), f"{each.name} computes another loss than one rank"
    # The first round warms up.
    return {each: [step for _, step in steps[1:]] for each, steps in found.items()}


def _step_row(kind: str, batch: str, side: Side, steps: Sequence[Spent], of_one: Sequence[Spent]) -> Row:
    exchanging = 100 * statistics.median(step.exchanging / step.seconds for step in steps)
    is_single = side.layout == "single"
    return {
        "layout": f"{kind}, {side.name}",
        "batch": batch,
        "ms": 1000 * statistics.median(step.seconds for step in steps),
        "times one rank's rate": median_ratio([one.seconds for one in of_one], [step.seconds for step in steps]),
        "in exchanges, %": None if is_single else exchanging,
        "exchanges": None if is_single else steps[0].num_exchanges,
        "CPU, times one rank's": median_ratio([step.cpu for step in steps], [one.cpu for one in of_one]),
    }


# Memory

# 336 MB in float32, nine tenths of it in the layers, which fsdp shards.
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 4096,
    "initializer_range": 0.02,
}
RANKS = (1, 2, 4)
PASS_LENGTH = 256
LOAD = Workload(PASS_LENGTH, "float32", micro_batch_tokens=PASS_LENGTH, lora_rank=RANK, adapter_slots=1, samples=False)
HANG_SECONDS = 600.0


@dataclass(frozen=True)
class RankMemory:
    """Figures of the rank that takes most memory. least: the pass that grew its process least."""

    spec: ParallelSpec
    loading: Loading
    least: MeteredPass
    planned: MemoryEstimate

    @property
    def planned_pass(self) -> int:
        """Returns the bytes that a pass makes, including its operation's gradients."""
        return self.planned.work + self.planned.trainable.weights

    @property
    def distance(self) -> float:
        return abs(self.least.tensors / self.planned_pass - 1)


def layout_memory(setup: Setup) -> Section:
    model = tiny_model("qwen3", setup.scratch / "memory", **SIZES)
    shape = read_model(ServedModel("measured", str(model)))
    assert isinstance(shape, ModelShape)
    whole = estimate(shape, SINGLE, LOAD).base
    ranks = [_rank_memory(model, shape, ParallelSpec(fsdp=size), setup) for size in RANKS]
    lines = [
        Line(
            f"{each.spec}: loading, times its part of the model",
            each.loading.growth / (whole / each.spec.fsdp),
            "at most",
            1.1,
        )
        for each in ranks
        if each.spec.fsdp > 1
    ]
    lines += [
        Line(f"{each.spec}: tensors of a pass, distance from plan's as a share of it", each.distance, "at most", 0.1)
        for each in ranks
    ]
    notes = [
        f"A Qwen3 of {whole / 1e6:.0f} MB in float32; the rank that takes most. Taken while loading: memory with no",
        "file behind it, at most. Mapped: pages of the model's files, which ranks of a machine share and the system",
        f"can reclaim. A pass: {PASS_LENGTH} tokens on each rank, forward and backward of a run of rank {RANK};",
        f"tensors alive at most, and memory of the process above that before, the least of {setup.rounds} passes after",
        "a first one.",
    ]
    return Section("Memory of each rank", [_memory_row(each, whole) for each in ranks], lines, notes)


def _rank_memory(model: Path, shape: ModelShape, spec: ParallelSpec, setup: Setup) -> RankMemory:
    options = {"micro_batch_tokens": PASS_LENGTH, "hang_seconds": HANG_SECONDS}
    with layout(model, spec, setup.scratch, METERED, **options) as where:
        where.call("create_run", RunSpec("run", LORA))
        _, *passes = (_metered_pass(where) for _ in range(1 + setup.rounds))
        loading = max(where.answers("loading"), key=lambda each: each.growth)
    least = min(passes, key=lambda each: each.growth)
    return RankMemory(spec, loading, least, estimate(shape, spec, LOAD))


def _metered_pass(where: Layout) -> MeteredPass:
    run_step(where, rows([PASS_LENGTH] * where.spec.num_data_shares))
    return max(where.answers("metered_pass"), key=lambda each: each.growth)


def _memory_row(rank: RankMemory, whole: int) -> Row:
    return {
        "layout": "one rank" if rank.spec == SINGLE else str(rank.spec),
        "loading, MB": rank.loading.growth / 1e6,
        "of the model, %": 100 * rank.loading.growth / whole,
        "mapped, MB": rank.loading.mapped / 1e6,
        "plan's base, MB": rank.planned.base / 1e6,
        "tensors of a pass, MB": rank.least.tensors / 1e6,
        "plan's, MB": rank.planned_pass / 1e6,
        "process, MB": rank.least.growth / 1e6,
    }


# Decoding

SAMPLES, PROMPT, LENGTH = 4, 64, 64
MAX_TIMES = 3


@dataclass(frozen=True)
class DecodeSide:
    """rows: that decode at once, on all ranks together."""

    layout: str
    rows: int = 32

    @property
    def name(self) -> str:
        return f"{'one rank' if self.layout == 'single' else self.layout}, {self.rows} rows"


ONE_DECODES = DecodeSide("single")
# Along tp, ranks decode the same rows; along fsdp, each decodes its own.
DECODE_SIDES = (ONE_DECODES, DecodeSide("tp=2"), DecodeSide("fsdp=2"), DecodeSide("fsdp=2", 64))


def layout_decoding(setup: Setup) -> Section:
    model = tiny_model("qwen3", setup.scratch / "decoding", **SHAPE)
    seeds = count()
    with ExitStack() as stack:
        ranks = {name: _sampling_ranks(stack, setup, model, name) for name in {each.layout for each in DECODE_SIDES}}

        def decode(side: DecodeSide) -> Spent:
            return _decode(ranks[side.layout], side.rows, next(seeds))

        sides = {side: lambda side=side: decode(side) for side in DECODE_SIDES}
        steps = in_turn(sides, setup.rounds, warm_ups=1)
    seconds = {side: [step.seconds for step in of_side] for side, of_side in steps.items()}
    times = {side: ratios(seconds[side], seconds[ONE_DECODES]) for side in DECODE_SIDES}
    table = [
        {
            "a step of decoding": side.name,
            "ms": 1000 * statistics.median(seconds[side]),
            **spread("times one rank's", times[side]),
            "CPU ms of all ranks": 1000 * statistics.median(step.cpu for step in steps[side]),
        }
        for side in DECODE_SIDES
    ]
    lines = [
        Line(f"a step of decoding, {side.name}: times one rank's", statistics.median(times[side]), "at most", MAX_TIMES)
        for side in DECODE_SIDES
        if side is not ONE_DECODES and side.rows == ONE_DECODES.rows
    ]
    notes = [
        f"Medians of {setup.rounds} rounds, layouts in turn; a thread for each rank. {SAMPLES} samples of {LENGTH}",
        f"tokens to each prompt of {PROMPT}, by an adapter of rank {RANK}: the mean of all steps after the prefill,",
        "in slices of 50 ms, for which ranks along fsdp gather all layers. Along tp both ranks decode the same rows,",
        "along fsdp each has half of them.",
    ]
    return Section("A step of decoding", table, lines, notes)


def _sampling_ranks(stack: ExitStack, setup: Setup, model: Path, name: str) -> Layout:
    """Starts ranks whose sampler has an adapter that was trained for a step."""
    # All prompts are prefilled at once, so that all rows decode from then on.
    where = _started(stack, setup, model, name, kv_cache_bytes=1 << 28, prefill_chunk_tokens=64 * PROMPT)
    run_step(where, rows([PROMPT] * SAMPLES))
    where.call("copy_adapter", "run", "sampler")
    return where


def _decode(where: Layout, num_rows: int, seed: int) -> Spent:
    """Returns the mean of the steps after the prefill."""
    result = where.run_slice(_jobs(num_rows, seed), 0.0)
    (done,) = {len(part.tokens) for parts in result.progress.values() for part in parts}
    assert sum(map(len, result.progress.values())) == num_rows, "all rows begin in the first slice"

    def decode() -> dict[str, Any]:
        slices = [where.run_slice()]
        while slices[-1].num_active:
            slices.append(where.run_slice())
        return {name: answer for each in slices for name, answer in each.finished.items()}

    finished, all_steps = spent(where, decode)
    assert all(len(sequence.tokens) == LENGTH for answer in finished.values() for sequence in answer.sequences)
    return Spent(*(figure / (LENGTH - done) for figure in vars(all_steps).values()))


def _jobs(num_rows: int, seed: int) -> tuple[SampleJob, ...]:
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=0)
    return tuple(
        SampleJob(f"job-{i}", "sampler", np.array(each, np.int32), params, (), (), SAMPLES, streams=True)
        for i, each in enumerate(prompts(num_rows // SAMPLES, PROMPT, seed))
    )

"""Memory of each rank along fsdp: what loading a model takes at most, and a pass, against what is planned."""

from dataclasses import dataclass
from pathlib import Path

from ...workers.planner.estimate import Memory, estimate
from ...workers.planner.load import Load
from ...workers.protocol.config import ServedModel
from ...workers.protocol.parallel_spec import SINGLE, ParallelSpec
from ...workers.protocol.verbs import RunSpec
from ...workers.shapes.model_shape import ModelShape, read_model
from ..tiny import tiny_model
from ..workers.parallel.training import Layout, layout
from .layout_steps import LORA, run_step
from .metered_worker import METERED, Loading, MeteredPass
from .report import Line, Row, Section
from .workload import RANK, rows

# 336 MB in float32, nine tenths of it in the layers, which fsdp shares out.
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
LENGTH = 256
LOAD = Load(LENGTH, "float32", micro_batch_tokens=LENGTH, lora_rank=RANK, adapter_slots=1, samples=False)
HANG_SECONDS = 600.0


@dataclass(frozen=True)
class Outcome:
    """Of the rank that takes most. passes: of those measured, the one that took least of the machine."""

    spec: ParallelSpec
    loading: Loading
    least: MeteredPass
    planned: Memory


def layout_memory(_: Path, scratch: Path, pool: str, rounds: int) -> Section:
    model = tiny_model("qwen3", scratch / "memory", **SIZES)
    shape = read_model(ServedModel("measured", str(model)))
    assert isinstance(shape, ModelShape)
    whole = estimate(shape, SINGLE, LOAD).base
    outcomes = [_measured(model, shape, ParallelSpec(fsdp=size), scratch, rounds) for size in RANKS]
    lines = [
        Line(f"{each.spec}: loading, times its part of the model", _parts_loaded(each, whole), "at most", 1.1)
        for each in outcomes
        if each.spec.fsdp > 1
    ]
    lines += [
        Line(f"{each.spec}: tensors of a pass, distance from plan's as a share of it", _distance(each), "at most", 0.1)
        for each in outcomes
    ]
    notes = [
        f"A Qwen3 of {whole / 1e6:.0f} MB in float32; the rank that takes most. Taken while loading: memory with no",
        "file behind it, at most. Mapped: pages of the model's files, which ranks of a machine share and the system",
        f"takes back when it wants to. A pass: {LENGTH} tokens on each rank, forward and backward of a run of rank",
        f"{RANK}; tensors alive at most, and memory of the process above that before, the least of {rounds} passes",
        "after a first one.",
    ]
    return Section("Memory of each rank", [_row(each, whole) for each in outcomes], lines, notes)


def _measured(model: Path, shape: ModelShape, spec: ParallelSpec, scratch: Path, rounds: int) -> Outcome:
    knobs = {"micro_batch_tokens": LENGTH, "hang_seconds": HANG_SECONDS}
    with layout(model, spec, scratch, METERED, **knobs) as where:
        where.call("create_run", RunSpec("run", LORA))
        _pass(where)
        passes = [_pass(where) for _ in range(rounds)]
        loading = max(where.answers("loading"), key=lambda each: each.taken.growth)
    least = min(passes, key=lambda each: each.taken.growth)
    return Outcome(spec, loading, least, estimate(shape, spec, LOAD))


def _pass(where: Layout) -> MeteredPass:
    """And the step behind it."""
    run_step(where, rows([LENGTH] * where.spec.num_shares))
    return max(where.answers("metered_pass"), key=lambda each: each.taken.growth)


def _parts_loaded(outcome: Outcome, whole: int) -> float:
    return outcome.loading.taken.growth / (whole / outcome.spec.fsdp)


def _planned(outcome: Outcome) -> int:
    """What a pass makes, the gradients of its operation included."""
    return outcome.planned.work + outcome.planned.learned.weights


def _distance(outcome: Outcome) -> float:
    return abs(outcome.least.tensors / _planned(outcome) - 1)


def _row(outcome: Outcome, whole: int) -> Row:
    loading = outcome.loading
    return {
        "layout": "one rank" if outcome.spec == SINGLE else str(outcome.spec),
        "loading, MB": loading.taken.growth / 1e6,
        "of the model, %": 100 * loading.taken.growth / whole,
        "mapped, MB": loading.mapped / 1e6,
        "plan's base, MB": outcome.planned.base / 1e6,
        "tensors of a pass, MB": outcome.least.tensors / 1e6,
        "plan's, MB": _planned(outcome) / 1e6,
        "process, MB": outcome.least.taken.growth / 1e6,
    }

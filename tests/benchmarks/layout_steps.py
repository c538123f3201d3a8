"""Training steps of two ranks against those of one rank on the same batches, and how much of them exchanges take."""

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ...schemas.models import LoraConfig
from ...schemas.training import AdamParams, ForwardBackwardOutput, ForwardBackwardRequest
from ...workers.protocol.config import ZeroStage
from ...workers.protocol.parallel_spec import ParallelSpec
from ...workers.protocol.verbs import RunSpec, Step
from ..tiny import tiny_model
from ..workers.parallel.training import Layout, close, layout
from .exchange_clock import CLOCKED
from .report import Row, Section
from .step_profile import datum
from .workload import RANK, SHAPE, Rows, batches

BATCHES = ("16x128", "4x512")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
LORA = LoraConfig(rank=RANK, seed=0, train_unembed=False)
ADAM = AdamParams(learning_rate=1e-4)


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


def _sides(*layouts: Side) -> list[Side]:
    """Those of one model, one rank first. With a thread for each core one rank has what two ranks have."""
    return [ONE, Side("single", threads=max(2, os.cpu_count() or 1)), *layouts]


SIDES = {
    "qwen3": _sides(
        Side("replicas=2"),
        Side("fsdp=2"),
        Side("fsdp=2", zero_stage="2"),
        Side("tp=2"),
        Side("sp=2"),
    ),
    "qwen3_moe": _sides(Side("ep=2")),
}


@dataclass(frozen=True)
class TimedStep:
    """seconds: until the answer is here. exchanging: of these, on average of the ranks. cpu: of all ranks together.
    num_exchanges: of tensors."""

    loss: float
    seconds: float
    exchanging: float
    cpu: float
    num_exchanges: int


def layout_steps(_: Path, scratch: Path, pool: str, rounds: int) -> Section:
    table = [row for kind in SIDES for row in _measured(kind, scratch, rounds)]
    notes = [
        f"A forward_backward and an optim_step of a run of rank {RANK}, from the call of the ranks to their answer;",
        f"medians of {rounds} rounds, all layouts of a model in turn. A rank has one thread where no more are named.",
        "In exchanges: the share of a step that a rank spends in exchanges, waiting for the other rank included, the",
        "mean of both; what arrives while it computes does not count. CPU: of all ranks together. qwen3_moe:",
        f"{EXPERTS['num_experts']} experts of {EXPERTS['moe_intermediate_size']} features, of which a token takes "
        f"{EXPERTS['num_experts_per_tok']}, adapted as well.",
    ]
    return Section("Steps of several ranks", table, (), notes)


def _measured(kind: str, scratch: Path, rounds: int) -> list[Row]:
    model = tiny_model(kind, scratch / f"{kind}-steps", **(SHAPE | (EXPERTS if kind == "qwen3_moe" else {})))
    with ExitStack() as stack:
        ranks = {side: _started(side, model, scratch, stack) for side in SIDES[kind]}
        return [row for batch in BATCHES for row in _of_batch(kind, batch, ranks, rounds)]


def _started(side: Side, model: Path, scratch: Path, stack: ExitStack) -> Layout:
    spec = ParallelSpec.parse(side.layout)
    where = stack.enter_context(layout(model, spec, scratch, CLOCKED, threads=side.threads, zero_stage=side.zero_stage))
    where.call("create_run", RunSpec("run", LORA))
    return where


def _of_batch(kind: str, batch: str, ranks: Mapping[Side, Layout], rounds: int) -> list[Row]:
    rows = batches()[batch]
    warm_up = {side: timed_step(where, rows) for side, where in ranks.items()}
    for side, step in warm_up.items():
        assert close([step.loss], [warm_up[ONE].loss]), f"{side.name} computes another loss than one rank"
    steps: dict[Side, list[TimedStep]] = {side: [] for side in ranks}
    for _ in range(rounds):
        for side, where in ranks.items():
            steps[side].append(timed_step(where, rows))
    return [_row(kind, batch, side, steps[side], steps[ONE]) for side in ranks]


def timed_step(where: Layout, rows: Rows) -> TimedStep:
    before, sent_before = where.answers("clocks"), where.call("num_exchanges")
    started = time.perf_counter()
    loss = run_step(where, rows)
    seconds = time.perf_counter() - started
    after, sent = where.answers("clocks"), where.call("num_exchanges")
    return TimedStep(
        loss=loss,
        seconds=seconds,
        exchanging=(sum(each.exchanging for each in after) - sum(each.exchanging for each in before)) / len(after),
        cpu=sum(each.cpu for each in after) - sum(each.cpu for each in before),
        num_exchanges=sum(sent.values()) - sum(sent_before.values()),
    )


def run_step(where: Layout, rows: Rows) -> float:
    """A pass of the run and its step; answers the loss."""
    (output,) = where.run_pass(ForwardBackwardRequest("run", 1, tuple(map(datum, rows)), "cross_entropy"))
    (metrics,) = where.call("apply_steps", (Step("run", ADAM),))
    assert isinstance(output, ForwardBackwardOutput) and isinstance(metrics, dict), (output, metrics)
    return output.metrics["loss:sum"]


def _row(kind: str, batch: str, side: Side, steps: Sequence[TimedStep], of_one: Sequence[TimedStep]) -> Row:
    in_turn = list(zip(steps, of_one, strict=True))
    exchanging = 100 * statistics.median(step.exchanging / step.seconds for step in steps)
    alone = side.layout == "single"
    return {
        "layout": f"{kind}, {side.name}",
        "batch": batch,
        "ms": 1000 * statistics.median(step.seconds for step in steps),
        "times one rank's rate": statistics.median(one.seconds / step.seconds for step, one in in_turn),
        "in exchanges, %": None if alone else exchanging,
        "exchanges": None if alone else steps[0].num_exchanges,
        "CPU, times one rank's": statistics.median(step.cpu / one.cpu for step, one in in_turn),
    }

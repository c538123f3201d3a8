"""Memory of a worker: what a pass takes at its peak, and what server and worker hold during long work and at rest."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from trainhouse.schemas.models import DraftConfig, TrainingConfig
from trainhouse.schemas.training import ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.server.cli.demo import converted_model
from trainhouse.workers.protocol.calls import RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec

from ..live import LiveServer
from ..tiny import tiny_model
from ..workers.parallel.training import Layout, layout
from .harness import LORA, THREADS, VOCAB, Child, Line, Row, Section, Setup, child, request, rest, rows
from .processes.workers import PEAK, Cost

LENGTH = 512
MICRO_BATCH_SIZES = (1024, 2048, 4096, 8192, 16384)
PASS_SIZES = (4096, 8192, 16384, 32768, 65536)
KIB_PER_TOKEN = 100
"""The figures of docs/performance.md for a micro-batch of the benchmarks' model."""
LARGE_VOCAB, LARGE_VOCAB_TOKENS = 65536, 8192
HANG_SECONDS = 600.0


class MeasuredRun:
    """A run in fresh processes, after one pass to warm up."""

    def __init__(self, where: Layout, training: TrainingConfig, warm_up: ForwardBackwardRequest) -> None:
        self.where = where
        is_draft = isinstance(training, DraftConfig)
        where.call("create_run", RunSpec("run", training, "draft" if is_draft else "policy"))
        if is_draft and training.draft_vocab_size is not None:
            where.call("set_vocabulary", "run", np.arange(training.draft_vocab_size))
        self.cost(warm_up)

    def cost(self, work: ForwardBackwardRequest) -> Cost:
        """Returns the largest of the ranks' costs; the growth means something only if no earlier pass was larger."""
        (output,) = self.where.run_pass(work)
        assert isinstance(output, ForwardBackwardOutput), output
        costs = self.where.answers("pass_cost")
        return Cost(max(each.growth for each in costs), max(each.seconds for each in costs))


@contextmanager
def measured_run(
    model: Path,
    scratch: Path,
    training: TrainingConfig,
    warm_up: ForwardBackwardRequest,
    spec: ParallelSpec = SINGLE,
    **options: Any,
) -> Iterator[MeasuredRun]:
    """options: of WorkerConfig."""
    with layout(model, spec, scratch, PEAK, hang_seconds=HANG_SECONDS, **options) as where:
        yield MeasuredRun(where, training, warm_up)


def growths(model: Path, scratch: Path, vocab_size: int, pass_sizes: Sequence[int], **options: int) -> list[int]:
    """Returns the bytes by which passes of so many tokens, each larger than the last, raise a fresh process's peak."""

    def work(tokens: int, length: int) -> ForwardBackwardRequest:
        return request("run", rows([length] * (tokens // length), vocab_size=vocab_size), prompt_share=1 / 3)

    with measured_run(model, scratch, LORA, work(64, 64), device="cpu", **options) as run:
        return [run.cost(work(tokens, LENGTH)).growth for tokens in pass_sizes]


def memory(setup: Setup) -> Section:
    def growth(tokens: int, **options: int) -> int:
        return growths(setup.model, setup.scratch, VOCAB, [tokens], threads=THREADS, **options)[0]

    in_one = [growth(tokens, micro_batch_tokens=MICRO_BATCH_SIZES[-1]) for tokens in MICRO_BATCH_SIZES]
    in_many = [growth(tokens) for tokens in PASS_SIZES]
    large_growth = _large_vocabulary_growth(setup)
    slope, residual = _line_fit(MICRO_BATCH_SIZES, in_one)
    slope_of_pass, _ = _line_fit(PASS_SIZES, in_many)
    logits = 4 * LARGE_VOCAB * LARGE_VOCAB_TOKENS
    lines = [
        Line("one micro-batch, KiB per token", slope / 1024, "at most", KIB_PER_TOKEN),
        Line("its largest distance from a line, as a share of the largest growth", residual, "at most", 0.1),
        Line("many micro-batches, KiB per token of the pass", slope_of_pass / 1024, "at most", 4),
        Line(f"vocabulary {LARGE_VOCAB}: growth over the bytes of all logits", large_growth / logits, "at most", 0.5),
    ]
    notes = [
        f"Peak resident memory above that of the loaded worker; forward and backward of sequences of {LENGTH} tokens.",
    ]
    table = [*_rows("one micro-batch", MICRO_BATCH_SIZES, in_one), *_rows("of 4096", PASS_SIZES, in_many)]
    table += _rows(f"one, vocabulary {LARGE_VOCAB}", [LARGE_VOCAB_TOKENS], [large_growth])
    return Section("Memory of a pass", table, lines, notes)


def _large_vocabulary_growth(setup: Setup) -> int:
    model = tiny_model("qwen3", setup.scratch / "large-vocabulary", vocab_size=LARGE_VOCAB)
    options = {"threads": THREADS, "micro_batch_tokens": LARGE_VOCAB_TOKENS}
    return growths(model, setup.scratch, LARGE_VOCAB, [LARGE_VOCAB_TOKENS], **options)[0]


def _line_fit(tokens: Sequence[int], growths: Sequence[int]) -> tuple[float, float]:
    """Returns bytes per token, and the largest residual as a share of the largest growth."""
    slope, start = np.polyfit(tokens, growths, 1)
    residuals = np.asarray(growths) - (slope * np.asarray(tokens) + start)
    return float(slope), float(np.abs(residuals).max() / max(growths))


def _rows(kind: str, sizes: Sequence[int], growths: Sequence[int]) -> list[Row]:
    return [
        {"micro-batches": kind, "tokens": tokens, "MiB": growth / 2**20, "KiB per token": growth / 1024 / tokens}
        for tokens, growth in zip(sizes, growths, strict=True)
    ]


# Server and worker

TENANTS, SHORTEST, LONGEST = 8, 8, 200
LARGE_TOKENS = 4096
IDLE_SECONDS = 60.0
MAX_MB = 1200.0
TIMES_ACCOUNT, BEYOND_MB = 1.3, 400.0
"""A worker at rest may hold TIMES_ACCOUNT times what it reports, and BEYOND_MB for interpreter and libraries."""


@dataclass(frozen=True)
class Sizes:
    """Megabytes of resident memory. minute: since the start of the work. account: what the worker reports to hold."""

    minute: float
    server: float
    worker: float
    account: float

    @property
    def allowed(self) -> float:
        """Returns the bound of a worker at rest."""
        return TIMES_ACCOUNT * self.account + BEYOND_MB

    def row(self, when: str) -> Row:
        return {"when": when, "server": self.server, "worker": self.worker, "worker's account": self.account}


def soak(setup: Setup) -> Section:
    """Measures for as many minutes as there are rounds."""
    with setup.server("soak") as server, ragged_tenants(server, 60.0 * setup.rounds) as tenants:
        small = list(_watched(server, 60.0 * setup.rounds))
        tenants.receive()
        small_at_rest = _at_rest(server)
    large, large_at_rest = _large_pass(replace(setup, model=converted_model()))
    # The first second of each minute.
    minutes = {int(each.minute + 0.02): each for each in reversed(small)}
    table = [
        *(minutes[minute].row(f"eight tenants, minute {minute}") for minute in sorted(minutes) if minute),
        small_at_rest.row(f"{IDLE_SECONDS:.0f} s later"),
        large.row(f"SmolLM2-135M, a pass of {LARGE_TOKENS} tokens"),
        large_at_rest.row(f"{IDLE_SECONDS:.0f} s later"),
    ]
    lines = [
        Line("eight tenants: most of the worker, MB", max(each.worker for each in small), "at most", MAX_MB),
        Line("then at rest, over what is allowed", small_at_rest.worker / small_at_rest.allowed, "at most", 1.0),
        Line("SmolLM2 at rest, over what is allowed", large_at_rest.worker / large_at_rest.allowed, "at most", 1.0),
    ]
    notes = [
        f"MB of resident memory. {TENANTS} tenants, each with steps of 1 to 8 rows of {SHORTEST} to {LONGEST} tokens.",
        "The account: weights, adapters, models and caches that GET /workers reports. At rest a worker is allowed",
        f"{TIMES_ACCOUNT} of it and {BEYOND_MB:.0f} MB.",
    ]
    return Section("Resident memory", table, lines, notes)


@contextmanager
def ragged_tenants(server: LiveServer, seconds: float) -> Iterator[Child]:
    """Starts tenants that train on rows of ever new lengths; they answer when the time is over."""
    with child("clients", "tenants") as tenants:
        tenants.ask({"url": server.url, "keys": [f"tml-soak{i}" for i in range(TENANTS)]})
        work = {"work": "ragged", "shortest": SHORTEST, "longest": LONGEST, "seconds": seconds}
        tenants.send([work | {"seed": i} for i in range(TENANTS)])
        yield tenants


def _large_pass(setup: Setup) -> tuple[Sizes, Sizes]:
    """Returns the sizes after the pass, and at rest."""
    lengths = LARGE_TOKENS // LENGTH * [LENGTH]
    with setup.server("large-pass") as server, child("clients", "tenants") as one:
        one.ask({"url": server.url, "keys": ["tml-large"]})
        one.ask([{"work": "train", "lengths": lengths, "steps": 1, "in_flight": 1}])
        return sizes_of(server), _at_rest(server)


def _watched(server: LiveServer, seconds: float) -> Iterator[Sizes]:
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        yield sizes_of(server, passed / 60)
        time.sleep(1)


def _at_rest(server: LiveServer) -> Sizes:
    time.sleep(IDLE_SECONDS)
    return sizes_of(server)


def sizes_of(server: LiveServer, minute: float = 0.0) -> Sizes:
    """Measures a server with one worker."""
    process = psutil.Process(server.process.pid)
    worker = max(each.memory_info().rss for each in process.children(recursive=True))  # a child of the forkserver
    with rest(server.url, "tml-soak0") as http:
        (group,) = http.get("workers").raise_for_status().json()["groups"].values()
    account = sum(group[purpose] for purpose in ("base_weights", "kv_cache", "adapters", "full_models", "drafts"))
    return Sizes(minute, process.memory_info().rss / 1e6, worker / 1e6, account / 1e6)

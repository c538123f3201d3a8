"""Shared parts of the benchmarks: the report, child processes, rounds in turn, servers, and what all of them train.

Child processes that must stay light import it, so it loads neither torch nor the official SDK (which imports torch).
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import numpy as np
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import Datum, ForwardBackwardRequest

from ..live import LiveServer, live_server

MODEL = "tiny/qwen3-bench"
KEY = "tml-bench"
THREADS = os.cpu_count() or 1
RANK = 8
LORA = LoraConfig(rank=RANK, seed=0, train_unembed=False)
VOCAB = 4096
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "initializer_range": 0.02,
}
EXIT_SECONDS = 30

K = TypeVar("K")
T = TypeVar("T")
Rows = list[list[int]]
"""Token rows; a row of n + 1 tokens trains n positions."""
Row = Mapping[str, str | float | None]
"""One line of a table: column -> cell."""


# The workload


def rows(lengths: Iterable[int], seed: int = 0, vocab_size: int = VOCAB) -> Rows:
    random = np.random.default_rng(seed)
    return [random.integers(3, vocab_size, length + 1).tolist() for length in lengths]


def prompts(number: int, length: int, seed: int) -> Rows:
    return [row[:length] for row in rows([length] * number, seed)]


def log_uniform(low: int, high: int, num_rows: int) -> list[int]:
    """Returns lengths from `low` to `high` at equal steps of their logarithm, in random order: many short, few long."""
    lengths = np.geomspace(low, high, num_rows).round().astype(int)
    return np.random.default_rng(0).permutation(lengths).tolist()


def batches() -> dict[str, Rows]:
    return {
        "16x128": rows([128] * 16),
        "4x512": rows([512] * 4),
        "16x(16..256)": rows(log_uniform(16, 256, 16)),
        "16x(8..512)": rows(log_uniform(8, 512, 16)),
    }


def num_tokens(batch: Rows) -> int:
    return sum(len(row) - 1 for row in batch)


def request(
    run_id: str, token_rows: Rows, seq_id: int = 1, *, forward_only: bool = False, prompt_share: float = 0.0
) -> ForwardBackwardRequest:
    """Returns a cross_entropy pass over the rows.

    seq_id: 0 leaves the numbering to the server. prompt_share: the part of each row, from its start, that has no loss.
    """
    data = tuple(_datum(row, prompt_share) for row in token_rows)
    return ForwardBackwardRequest(run_id, seq_id, data, "cross_entropy", forward_only=forward_only)


def _datum(row: list[int], prompt_share: float) -> Datum:
    length = len(row) - 1
    weights = (np.arange(length) >= int(length * prompt_share)).astype(np.float32)
    return Datum(np.asarray(row[:-1], np.int32), {"target_tokens": np.asarray(row[1:]), "weights": weights})


# Servers


@dataclass(frozen=True)
class Setup:
    """The input of a section, which puts its files into scratch and starts its servers with the pool, local or ray."""

    model: Path
    scratch: Path
    pool: str
    rounds: int

    def server(self, name: str, **options: Any) -> AbstractContextManager[LiveServer]:
        """Runs a server of the model, a thread for each core, until the end of the block.

        name: of its state directory. options: see `live_server`.
        """
        return live_server({MODEL: self.model}, self.scratch / name, self.pool, **({"threads": THREADS} | options))


def rest(url: str, key: str = KEY, timeout: float = 60) -> httpx.Client:
    return httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=timeout)


def create_run(http: httpx.Client) -> str:
    """Returns the run's id as soon as the run exists."""

    def post(path: str, body: dict[str, object]) -> dict[str, str]:
        return http.post(path, json=body, headers={"Prefer": "wait=40"}).raise_for_status().json()

    session = post("create_session", {"sdk_version": "bench"})["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": LORA.model_dump()}
    return post("create_model", body)["model_id"]


# Child processes


class Child:
    """A process that answers each line of JSON with a line of JSON, see `answer_lines`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin and process.stdout
        self._stdin, self._stdout = process.stdin, process.stdout

    def send(self, question: object) -> None:
        self._stdin.write(json.dumps(question) + "\n")
        self._stdin.flush()

    def receive(self) -> Any:
        """Raises RuntimeError if the process has ended instead."""
        if not (line := self._stdout.readline()):
            raise RuntimeError("a benchmark's process ended without an answer: its error is above")
        return json.loads(line)

    def ask(self, question: object) -> Any:
        self.send(question)
        return self.receive()


def child(module: str, *arguments: str) -> AbstractContextManager[Child]:
    """Runs a module of `processes` until the end of the block."""
    return running([sys.executable, "-m", f"trainhouse.tests.benchmarks.processes.{module}", *arguments])


@contextmanager
def running(command: list[str]) -> Iterator[Child]:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        try:
            yield Child(process)
        finally:
            process.stdin.close()
            try:
                process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def reply(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def answer_lines(answer: Callable[[Any], object]) -> None:
    """Answers the lines of standard input until it closes: the child's end of `Child`."""
    for line in sys.stdin:
        reply(answer(json.loads(line)))


# Rounds


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def one_round(sides: Mapping[K, Callable[[], T]], number: int) -> dict[K, T]:
    """Calls each side once; the order rotates with the number of the round, so each side is first in its turn."""
    names = list(sides)
    start = number % len(names)
    found = {name: sides[name]() for name in names[start:] + names[:start]}
    return {name: found[name] for name in names}


def in_turn(sides: Mapping[K, Callable[[], T]], rounds: int, warm_ups: int = 0) -> dict[K, list[T]]:
    """Returns the results of each side, one for each round after the warm-ups.

    Sides take turns because the speed of a shared machine drifts.
    """
    found = [one_round(sides, number) for number in range(warm_ups + rounds)]
    return {name: [each[name] for each in found[warm_ups:]] for name in sides}


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> list[float]:
    """Returns the ratio of each round."""
    return [numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True)]


def median_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    return statistics.median(ratios(numerators, denominators))


def spread(column: str, values: Sequence[float]) -> dict[str, float]:
    """Returns the cells of a table that show the median and the extremes of the rounds."""
    return {column: statistics.median(values), "lowest round": min(values), "highest round": max(values)}


# The report


@dataclass(frozen=True)
class Line:
    what: str
    value: float
    sense: Literal["at least", "at most"]
    wanted: float

    @property
    def passed(self) -> bool:
        return bool(self.value >= self.wanted if self.sense == "at least" else self.value <= self.wanted)

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        return f"{verdict}  {self.what}: {self.value:.2f}, {self.sense} {self.wanted:g} is asked for"


@dataclass(frozen=True)
class Section:
    """Holds the outcome of a benchmark. notes: explain the figures, and the settings that they depend on."""

    title: str
    table: Sequence[Row]
    lines: Sequence[Line]
    notes: Sequence[str] = field(default=())

    def __str__(self) -> str:
        """Returns Markdown, as in docs/performance.md."""
        lines = [f"- {line}" for line in self.lines]
        return "\n".join([f"\n## {self.title}\n", *self.notes, "", *_markdown(self.table), "", *lines])

    def as_json(self) -> dict[str, object]:
        lines = [vars(line) | {"passed": line.passed} for line in self.lines]
        return {"title": self.title, "notes": list(self.notes), "table": list(map(dict, self.table)), "lines": lines}


def _markdown(table: Sequence[Row]) -> list[str]:
    """Columns are as wide as their widest cell; the first is aligned left, the others right."""
    cells = [list(table[0]), *([_shown(value) for value in row.values()] for row in table)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    head, *body = [
        f"| {' | '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])} |" for row in cells
    ]
    return [head, f"|{rule}|", *body]


def _shown(value: str | float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"

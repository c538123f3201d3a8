"""Sixteen tenants of two client processes, each training on one short sequence a step, against one tenant that sends
all of it in one batch, and against one that sends a sixteenth alone.
"""

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ..live import LiveServer, live_server
from .child import Child, child
from .report import Line, Row, Section
from .workload import MODEL

TENANTS, LENGTH, STEPS = 16, 64, 30
WHOLE, ALONE, CROWD = "one tenant, 16x64", "one tenant, 1x64", "sixteen tenants, 1x64 each"

Work = Mapping[str, Any]
"""What one tenant does: see tenants."""
Load = Mapping[Child, Sequence[Work]]
"""What the tenants of each client process do at once."""


@dataclass(frozen=True)
class Outcome:
    """cpu: of the server and of its worker. latencies: of each tenant, from a forward_backward's submit to its result.

    All in seconds.
    """

    num_steps: int
    num_tokens: int
    elapsed: float
    cpu: np.ndarray
    latencies: list[np.ndarray]

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.elapsed

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.num_tokens / float(self.cpu.sum())

    @property
    def seconds_per_step(self) -> float:
        return self.elapsed / self.num_steps


Round = Mapping[str, Outcome]
"""Load's name -> what came of it."""


def many_tenants(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    with (
        live_server({MODEL: model}, scratch / "many-tenants", pool=pool, threads=os.cpu_count() or 1) as server,
        ExitStack() as stack,
    ):
        one, first, second = (_clients(stack, server, name, number) for name, number in (("a", 1), ("b", 8), ("c", 8)))
        loads = _loads(one, first, second)
        for load in loads.values():
            _run(server, load)
        outcomes = [{name: _run(server, load) for name, load in loads.items()} for _ in range(rounds)]
    notes = [
        f"Medians of {rounds} rounds. Tenants send two steps (forward_backward, optim_step) before they wait for the",
        "first; where there is one, four. One of the sixteen sends a step when its last is answered: its latency is",
        "measured, from a forward_backward's submit to its result. A pass: a step of all sixteen beside their clients;",
        f"in steps of {WHOLE}, alone on the machine, the latency is {_p95_latency(outcomes, WHOLE):.2f}.",
    ]
    return Section(f"{TENANTS} tenants from two client processes", _table(outcomes), _lines(outcomes), notes)


def _clients(stack: ExitStack, server: LiveServer, name: str, number: int) -> Child:
    """A process of so many tenants."""
    clients = stack.enter_context(child("tenants"))
    clients.ask({"url": server.url, "keys": [f"tml-{name}{i}" for i in range(number)]})
    return clients


def _loads(one: Child, first: Child, second: Child) -> dict[str, Load]:
    ahead = _train([LENGTH], STEPS, in_flight=2)
    step_by_step = _train([LENGTH], STEPS // 2, in_flight=1)
    return {
        WHOLE: {one: [_train([LENGTH] * TENANTS, STEPS, in_flight=4)]},
        ALONE: {one: [_train([LENGTH], 2 * STEPS, in_flight=4)]},
        CROWD: {first: [step_by_step] + 7 * [ahead], second: 8 * [ahead]},
    }


def _train(lengths: list[int], num_steps: int, in_flight: int) -> Work:
    return {"work": "train", "lengths": lengths, "steps": num_steps, "in_flight": in_flight}


def _run(server: LiveServer, load: Load) -> Outcome:
    cpu_before = _cpu_seconds(server)
    for clients, works in load.items():
        clients.send(works)
    tenants = [np.array(times) for clients in load for times in clients.receive()]
    works = [work for each in load.values() for work in each]
    return Outcome(
        num_steps=max(map(len, tenants)),
        num_tokens=sum(len(times) * sum(work["lengths"]) for times, work in zip(tenants, works, strict=True)),
        elapsed=float(max(times.max() for times in tenants) - min(times.min() for times in tenants)),
        cpu=_cpu_seconds(server) - cpu_before,
        latencies=[times[:, 1] - times[:, 0] for times in tenants],
    )


def _cpu_seconds(server: LiveServer) -> np.ndarray:
    """User and system time so far: of the server, and of the processes under it."""
    process = psutil.Process(server.process.pid)
    workers = [child.cpu_times() for child in process.children(recursive=True)]
    own = process.cpu_times()
    return np.array([own.user + own.system, sum(each.user + each.system for each in workers)])


def _table(rounds: Sequence[Round]) -> list[Row]:
    return [_row(name, [each[name] for each in rounds]) for name in (WHOLE, ALONE, CROWD)]


def _row(name: str, outcomes: Sequence[Outcome]) -> Row:
    server, worker = np.median([1000 * outcome.cpu / outcome.num_steps for outcome in outcomes], axis=0)
    return {
        "who sends": name,
        "tokens/s": _median(outcome.tokens_per_second for outcome in outcomes),
        "ms per step": 1000 * _median(outcome.seconds_per_step for outcome in outcomes),
        "CPU ms, server": float(server),
        "CPU ms, worker": float(worker),
        "tokens per CPU-second": _median(outcome.tokens_per_cpu_second for outcome in outcomes),
        "median latency, ms": 1000 * _median(np.median(outcome.latencies[0]) for outcome in outcomes),
    }


def _lines(rounds: Sequence[Round]) -> list[Line]:
    whole, alone = (
        _median(each[CROWD].tokens_per_second / each[name].tokens_per_second for each in rounds)
        for name in (WHOLE, ALONE)
    )
    cpu = _median(each[CROWD].tokens_per_cpu_second / each[WHOLE].tokens_per_cpu_second for each in rounds)
    return [
        Line(f"tokens/s of all, times those of {WHOLE}", whole, "at least", 0.65),
        Line(f"tokens/s of all, times those of {ALONE}", alone, "at least", 1.6),
        Line(f"tokens per CPU-second of the server, times those of {WHOLE}", cpu, "at least", 0.9),
        Line("p95 latency of one of the sixteen, in passes", _p95_latency(rounds, CROWD), "at most", 2.5),
    ]


def _p95_latency(rounds: Sequence[Round], name: str) -> float:
    """The p95 latency of one of the sixteen, in steps of those named."""
    # Each by the steps of its own round: the machine's speed drifts.
    waits = np.concatenate([each[CROWD].latencies[0] / each[name].seconds_per_step for each in rounds])
    return float(np.quantile(waits, 0.95))


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))

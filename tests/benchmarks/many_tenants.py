"""Sixteen tenants of two client processes, each training on one short sequence a step, against one tenant that sends
all of it in one batch, and against one that sends a sixteenth alone.
"""

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..live import LiveServer, live_server
from .child import Child, child
from .processor import cpu_seconds
from .report import Line, Row, Section
from .workload import MODEL

TENANTS, PROCESSES = 16, 2
LENGTH = 64
STEPS = 24
IN_FLIGHT = 2
WHOLE, ALONE, CROWD = "one tenant, 16x64", "one tenant, 1x64", "sixteen tenants, 1x64 each"


@dataclass(frozen=True)
class Load:
    """What each tenant of these client processes trains on, a step of it after the other."""

    name: str
    lengths: list[int]
    num_steps: int
    clients: Sequence[Child]


@dataclass(frozen=True)
class Outcome:
    """latencies: per tenant the seconds from the submit of each forward_backward to its result."""

    tokens_per_second: float
    tokens_per_cpu_second: float
    seconds_per_step: float
    latencies: list[np.ndarray]


Round = Mapping[str, Outcome]
"""Load's name -> what came of it."""


def many_tenants(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    with (
        live_server({MODEL: model}, scratch / "many-tenants", pool=pool, threads=os.cpu_count() or 1) as server,
        ExitStack() as stack,
    ):
        crowd = [_clients(stack, server, range(i, TENANTS, PROCESSES)) for i in range(PROCESSES)]
        one = [_clients(stack, server, range(TENANTS, TENANTS + 1))]
        loads = (
            Load(WHOLE, [LENGTH] * TENANTS, STEPS, one),
            Load(ALONE, [LENGTH], 2 * STEPS, one),
            Load(CROWD, [LENGTH], STEPS, crowd),
        )
        for load in loads:
            _run(load, server, num_steps=2)
        outcomes = [{load.name: _run(load, server, load.num_steps) for load in loads} for _ in range(rounds)]
    notes = [
        f"Medians of {rounds} rounds. Every tenant has a key of its own and sends {IN_FLIGHT} steps (forward_backward",
        "and optim_step) before it waits for the first; latency: from the submit of a forward_backward to its result.",
        f"A pass: a step of {WHOLE}. CPU: of the server and its worker, user and system.",
    ]
    return Section(f"{TENANTS} tenants from {PROCESSES} client processes", _table(outcomes), _lines(outcomes), notes)


def _clients(stack: ExitStack, server: LiveServer, numbers: range) -> Child:
    client = stack.enter_context(child("tenants"))
    client.ask({"url": server.url, "keys": [f"tml-tenant-{number}" for number in numbers]})
    return client


def _run(load: Load, server: LiveServer, num_steps: int) -> Outcome:
    cpu_before = cpu_seconds(server.process.pid)
    for client in load.clients:
        client.send({"work": "train", "lengths": load.lengths, "steps": num_steps, "in_flight": IN_FLIGHT})
    tenants = [np.array(times) for client in load.clients for times in client.receive()]
    cpu = cpu_seconds(server.process.pid) - cpu_before
    seconds = float(max(times.max() for times in tenants) - min(times.min() for times in tenants))
    tokens = len(tenants) * num_steps * sum(load.lengths)
    latencies = [times[:, 1] - times[:, 0] for times in tenants]
    return Outcome(tokens / seconds, tokens / cpu, seconds / num_steps, latencies)


def _table(rounds: Sequence[Round]) -> list[Row]:
    return [
        {
            "who sends": name,
            "tokens/s": _median(each[name].tokens_per_second for each in rounds),
            "tokens per CPU-second": _median(each[name].tokens_per_cpu_second for each in rounds),
            "ms per step": 1000 * _median(each[name].seconds_per_step for each in rounds),
            "median latency, ms": 1000 * _median(np.median(each[name].latencies) for each in rounds),
        }
        for name in (WHOLE, ALONE, CROWD)
    ]


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
        Line("p95 latency of the tenant with the longest, in passes", _longest_p95(rounds), "at most", 2.5),
    ]


def _longest_p95(rounds: Sequence[Round]) -> float:
    """In passes, each latency by the pass of its round: the machine's speed drifts."""
    by_tenant = zip(
        *([latency / each[WHOLE].seconds_per_step for latency in each[CROWD].latencies] for each in rounds), strict=True
    )
    return max(float(np.quantile(np.concatenate(latencies), 0.95)) for latencies in by_tenant)


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))

"""Resident memory of a server and its worker: while eight tenants train on rows of ever new lengths, after a pass that
is large, and once nothing has been asked for a minute.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from ...server.cli.demo import converted_model
from ..live import LiveServer, live_server
from .child import child
from .report import Line, Row, Section
from .workload import MODEL

TENANTS, SHORTEST, LONGEST = 8, 8, 200
LARGE_TOKENS, LARGE_LENGTH = 4096, 512
IDLE_SECONDS = 60.0
MOST_MB = 1200.0
TIMES_ACCOUNT, BEYOND_MB = 1.3, 400.0
"""A process at rest has at most so much of what it knows of, and so much more: interpreter and libraries."""


@dataclass(frozen=True)
class Sizes:
    """In MB. minute: since the start of the work."""

    minute: float
    server: float
    worker: float
    account: float

    @property
    def allowed(self) -> float:
        """To the worker, at rest."""
        return TIMES_ACCOUNT * self.account + BEYOND_MB


def soak(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    """rounds: minutes."""
    small, small_at_rest = _ragged(model, scratch / "soak", pool, minutes=rounds)
    large, large_at_rest = _large(converted_model(), scratch / "large-pass", pool)
    table = [
        *(_row(f"eight tenants, minute {each.minute:.0f}", each) for each in _each_minute(small)),
        _row(f"{IDLE_SECONDS:.0f} s later", small_at_rest),
        _row(f"SmolLM2-135M, a pass of {LARGE_TOKENS} tokens", large),
        _row(f"{IDLE_SECONDS:.0f} s later", large_at_rest),
    ]
    lines = [
        Line("eight tenants: most of the worker, MB", max(each.worker for each in small), "at most", MOST_MB),
        Line("then at rest, over what is allowed", small_at_rest.worker / small_at_rest.allowed, "at most", 1.0),
        Line("SmolLM2 at rest, over what is allowed", large_at_rest.worker / large_at_rest.allowed, "at most", 1.0),
    ]
    notes = [
        f"MB of resident memory. {TENANTS} tenants, each with steps of 1 to 8 rows of {SHORTEST} to {LONGEST} tokens.",
        "The account: weights, adapters, models and caches that GET /workers tells of. At rest a worker is allowed",
        f"{TIMES_ACCOUNT} of it and {BEYOND_MB:.0f} MB.",
    ]
    return Section("Resident memory", table, lines, notes)


def _ragged(model: Path, state: Path, pool: str, minutes: float) -> tuple[list[Sizes], Sizes]:
    """Once a second, and at rest."""
    with live_server({MODEL: model}, state, pool=pool, threads=os.cpu_count() or 1) as server, child("tenants") as them:
        them.ask({"url": server.url, "keys": [f"tml-soak{i}" for i in range(TENANTS)]})
        work = {"work": "ragged", "shortest": SHORTEST, "longest": LONGEST, "seconds": 60 * minutes}
        them.send([work | {"seed": i} for i in range(TENANTS)])
        sizes = list(_watched(server, 60 * minutes))
        them.receive()
        return sizes, _at_rest(server)


def _large(model: Path, state: Path, pool: str) -> tuple[Sizes, Sizes]:
    """After a pass, and at rest."""
    with live_server({MODEL: model}, state, pool=pool, threads=os.cpu_count() or 1) as server, child("tenants") as one:
        one.ask({"url": server.url, "keys": ["tml-large"]})
        one.ask(
            [{"work": "train", "lengths": LARGE_TOKENS // LARGE_LENGTH * [LARGE_LENGTH], "steps": 1, "in_flight": 1}]
        )
        return sizes_of(server, 0.0), _at_rest(server)


def _watched(server: LiveServer, seconds: float) -> Iterator[Sizes]:
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        yield sizes_of(server, passed / 60)
        time.sleep(1)


def _at_rest(server: LiveServer) -> Sizes:
    time.sleep(IDLE_SECONDS)
    return sizes_of(server, 0.0)


def sizes_of(server: LiveServer, minute: float) -> Sizes:
    """Of a server with one worker."""
    process = psutil.Process(server.process.pid)
    worker = max(each.memory_info().rss for each in process.children(recursive=True))  # a child of the forkserver
    return Sizes(minute, process.memory_info().rss / 1e6, worker / 1e6, _account(server) / 1e6)


def _account(server: LiveServer) -> int:
    """Bytes that the worker knows of."""
    answer = httpx.get(f"{server.url}/api/v1/workers", headers={"X-API-Key": "tml-soak0"}, timeout=60)
    (group,) = answer.raise_for_status().json()["groups"].values()
    return sum(group[purpose] for purpose in ("base_weights", "kv_cache", "adapters", "full_models", "drafts"))


def _each_minute(sizes: Sequence[Sizes]) -> Iterator[Sizes]:
    minute = 1.0
    for each in sizes:
        if each.minute >= minute - 0.02:
            yield each
            minute += 1


def _row(when: str, sizes: Sizes) -> Row:
    return {"when": when, "server": sizes.server, "worker": sizes.worker, "worker's account": sizes.account}

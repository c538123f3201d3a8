"""Durability: throughput and latency of a server and of one that writes nothing, in turn; and the time to recover."""

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import psutil
from trainhouse.schemas.codec import PROTOBUF, encode_forward_backward_request

from ..live import LiveServer
from .harness import Line, Rows, Section, Setup, batches, create_run, in_turn, num_tokens, request, rest, rows
from .processes.clients import connect
from .training import RemoteLoop

STEPS = 20
"""The steps of a round, in which one snapshot falls."""
NUM_SUBMITS = 60
NUM_IDLE = 100
VOLATILE = "trainhouse.tests.benchmarks.processes.servers"
BODIES = {"8 tokens": rows([8]), "4 x 512 tokens": rows([512] * 4)}


def durability(setup: Setup) -> Section:
    with setup.server("on") as on, setup.server("off", module=VOLATILE) as off:
        speeds = _speeds(on, off, setup.rounds)
        submits = {name: _submits(on, off, data, setup.rounds) for name, data in BODIES.items()}
        seconds_to_pass = statistics.median(_seconds_to_next_pass(on) for _ in range(setup.rounds))
    ready = {num: _seconds_to_ready(setup, num) for num in (0, NUM_IDLE)}
    table = [
        *({"what": f"tokens/s, {name}"} | pair for name, pair in speeds.items()),
        *({"what": f"submit of {name}, ms"} | pair for name, pair in submits.items()),
        {"what": "kill -9 of the worker to the next pass, s", "on": seconds_to_pass, "off": None},
        *(
            {"what": f"kill -9 and start with {num} idle runs to ready, s", "on": seconds, "off": None}
            for num, seconds in ready.items()
        ),
    ]
    lines = [
        *(
            Line(f"tokens/s of those without, {name}", pair["on"] / pair["off"], "at least", 0.95)
            for name, pair in speeds.items()
        ),
        *(
            Line(f"submit of {name}, ms added", pair["on"] - pair["off"], "at most", 1)
            for name, pair in submits.items()
        ),
    ]
    notes = [
        f"Medians of {setup.rounds} rounds of {STEPS} steps, pipelined, or {NUM_SUBMITS} submits; off: nothing is",
        "written.",
    ]
    return Section("Durability (--durability process)", table, lines, notes)


def _speeds(on: LiveServer, off: LiveServer, rounds: int) -> dict[str, dict[str, float]]:
    """Returns the tokens per second of each batch, on and off."""
    data = {name: batch for name, batch in batches().items() if name in ("16x128", "16x(8..512)")}
    with connect(on.url) as first, connect(off.url) as second:
        loops = {"on": RemoteLoop(first, data), "off": RemoteLoop(second, data)}
        return {name: _speeds_of(loops, name, num_tokens(batch), rounds) for name, batch in data.items()}


def _speeds_of(loops: dict[str, RemoteLoop], name: str, tokens: int, rounds: int) -> dict[str, float]:
    for loop in loops.values():
        loop.train(name, 2)
    seconds = in_turn({side: lambda loop=loop: loop.train(name, STEPS) for side, loop in loops.items()}, rounds)
    return {side: STEPS * tokens / statistics.median(of_side) for side, of_side in seconds.items()}


def _submits(on: LiveServer, off: LiveServer, data: Rows, rounds: int) -> dict[str, float]:
    """Returns the median milliseconds between sending a forward and its acknowledgement, on and off.

    Nothing else runs meanwhile.
    """
    with _submitting(on, data) as first, _submitting(off, data) as second:
        sides = {
            side: lambda submit=submit: [submit() for _ in range(NUM_SUBMITS // rounds)]
            for side, submit in (("on", first), ("off", second))
        }
        found = in_turn(sides, rounds)
    return {side: 1000 * statistics.median(chain(*of_side)) for side, of_side in found.items()}


@contextmanager
def _submitting(server: LiveServer, data: Rows) -> Iterator[Callable[[], float]]:
    with rest(server.url) as http:
        content = encode_forward_backward_request(request(create_run(http), data, 0, forward_only=True))

        def submit() -> float:
            started = time.perf_counter()
            answer = http.post("forward", content=content, headers={"Content-Type": PROTOBUF}).raise_for_status().json()
            seconds = time.perf_counter() - started
            http.post("retrieve_future", json={"request_id": answer["request_id"]}).raise_for_status()
            return seconds

        for _ in range(5):
            submit()
        yield submit


def _seconds_to_next_pass(server: LiveServer) -> float:
    """Measures from the death of the worker to the result of a pass that was submitted right after it."""
    with connect(server.url) as service:
        loop = RemoteLoop(service, {"small": rows([64] * 4)})
        loop.train("small", 3)
        worker = max(psutil.Process(server.process.pid).children(recursive=True), key=lambda one: one.memory_info().rss)
        worker.send_signal(signal.SIGKILL)
        return loop.train("small", 1)


def _seconds_to_ready(setup: Setup, num_runs: int) -> float:
    options = {"threads": 1, "tenant_runs": 1000}
    with setup.server(f"idle-{num_runs}", **options) as server:
        # By REST: the SDK's sessions end with their clients.
        with rest(server.url) as http:
            for _ in range(num_runs):
                create_run(http)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(20)
    started = time.perf_counter()
    with setup.server(f"idle-{num_runs}", **options):
        return time.perf_counter() - started

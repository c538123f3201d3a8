"""What it costs that nothing acknowledged is lost, and how long a death holds up who waits.

The durable server and one that writes nothing (volatile_server) take turns.
"""

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
import tinker
from trainhouse.schemas.codec import PROTOBUF, encode_forward_backward_request
from trainhouse.schemas.training import Datum, ForwardBackwardRequest

from ..live import LiveServer, live_server
from .empty_operation import create_run
from .one_tenant import RemoteLoop
from .report import Line, Section
from .workload import MODEL, Rows, batches, num_tokens, rows

STEPS = 20
"""A round, in which one snapshot falls."""
NUM_SUBMITS = 60
NUM_IDLE = 100
SIDES = {"on": "trainhouse.server", "off": "trainhouse.tests.benchmarks.volatile_server"}


def durability(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    threads = os.cpu_count() or 1
    with (
        live_server({MODEL: model}, scratch / "on", pool, SIDES["on"], threads=threads) as on,
        live_server({MODEL: model}, scratch / "off", pool, SIDES["off"], threads=threads) as off,
    ):
        speeds = _speeds(on, off, rounds)
        submits = {name: _submits(on, off, row, rounds) for name, row in _bodies().items()}
        seconds_to_pass = [_seconds_to_next_pass(on) for _ in range(rounds)]
    ready = {num: _seconds_to_ready(model, scratch / f"idle-{num}", pool, num) for num in (0, NUM_IDLE)}
    table = [
        *({"what": f"tokens/s, {name}", "on": pair[0], "off": pair[1]} for name, pair in speeds.items()),
        *({"what": f"submit of {name}, ms", "on": pair[0], "off": pair[1]} for name, pair in submits.items()),
        {"what": "kill -9 of the worker to the next pass, s", "on": statistics.median(seconds_to_pass), "off": None},
        *(
            {"what": f"kill -9 and start with {n} idle runs to ready, s", "on": s, "off": None}
            for n, s in ready.items()
        ),
    ]
    lines = [
        Line(f"tokens/s of those without, {name}", on / off, "at least", 0.95) for name, (on, off) in speeds.items()
    ]
    lines += [Line(f"submit of {name}, ms added", on - off, "at most", 1) for name, (on, off) in submits.items()]
    note = f"Medians of {rounds} rounds of {STEPS} steps, pipelined, or {NUM_SUBMITS} submits; off: nothing is written."
    return Section("Durability (--durability process)", table, lines, [note])


def _speeds(on: LiveServer, off: LiveServer, rounds: int) -> dict[str, tuple[float, float]]:
    """Batch -> tokens per second."""
    data: dict[str, Rows] = {name: batch for name, batch in batches().items() if name in ("16x128", "16x(8..512)")}
    with _service(on) as first, _service(off) as second:
        loops = [RemoteLoop(first, data), RemoteLoop(second, data)]
        return {name: _speeds_of(loops, name, num_tokens(batch), rounds) for name, batch in data.items()}


def _speeds_of(loops: list[RemoteLoop], name: str, tokens: int, rounds: int) -> tuple[float, float]:
    seconds: list[list[float]] = [[], []]
    for loop in loops:
        loop.train(name, 2)
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            seconds[side].append(loops[side].train(name, STEPS))
    on, off = (STEPS * tokens / statistics.median(one) for one in seconds)
    return on, off


def _bodies() -> dict[str, Rows]:
    return {"8 tokens": rows([8]), "4 x 512 tokens": rows([512] * 4)}


def _submits(on: LiveServer, off: LiveServer, data: Rows, rounds: int) -> tuple[float, float]:
    """Median milliseconds from sending a forward to hearing that it is accepted, while nothing else goes on."""
    times: list[list[float]] = [[], []]
    with _submitting(on, data) as first, _submitting(off, data) as second:
        for _ in range(rounds):
            for side, submit in enumerate((first, second)):
                times[side] += [submit() for _ in range(NUM_SUBMITS // rounds)]
    return 1e3 * statistics.median(times[0]), 1e3 * statistics.median(times[1])


@contextmanager
def _submitting(server: LiveServer, data: Rows) -> Iterator[Callable[[], float]]:
    with httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": "tml-bench"}, timeout=60) as http:
        http.headers["Prefer"] = "wait=30"
        run_id = create_run(http)
        del http.headers["Prefer"]
        datums = tuple(
            Datum(
                np.asarray(row[:-1], np.int32),
                {"target_tokens": np.asarray(row[1:]), "weights": np.ones(len(row) - 1, np.float32)},
            )
            for row in data
        )
        request = ForwardBackwardRequest(run_id, 0, datums, "cross_entropy", forward_only=True)
        content = encode_forward_backward_request(request)

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
    """From the death of the worker to the result of a pass that was submitted right behind it."""
    with _service(server) as service:
        loop = RemoteLoop(service, {"small": rows([64] * 4)})
        loop.train("small", 3)
        worker = max(psutil.Process(server.process.pid).children(recursive=True), key=lambda one: one.memory_info().rss)
        worker.send_signal(signal.SIGKILL)
        return loop.train("small", 1)


def _seconds_to_ready(model: Path, state_dir: Path, pool: str, num_runs: int) -> float:
    headers = {"X-API-Key": "tml-bench", "Prefer": "wait=30"}
    with live_server({MODEL: model}, state_dir, pool, tenant_runs=1000) as server:
        # By REST: the SDK's sessions end with their clients.
        with httpx.Client(base_url=f"{server.url}/api/v1/", headers=headers, timeout=60) as http:
            for _ in range(num_runs):
                create_run(http)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(20)
    started = time.perf_counter()
    with live_server({MODEL: model}, state_dir, pool, tenant_runs=1000):
        return time.perf_counter() - started


def _service(server: LiveServer) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key="tml-bench")

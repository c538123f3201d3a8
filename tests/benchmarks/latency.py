"""An empty operation from the official SDK to the worker and back, layer by layer, alone and beside waiting futures."""

import os
from pathlib import Path

from ..live import live_server
from .empty_operation import layers, processor_time, sdk
from .report import Line, Section
from .waiting_futures import NUM_WAITING, beside_waiting
from .workload import MODEL


def latency(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    threads = os.cpu_count() or 1
    with live_server({MODEL: model}, scratch / "latency", pool=pool, threads=threads) as server:
        medians = layers(model, server.url, threads, rounds)
        cpu = processor_time(server.process.pid, server.url)
        with sdk(server.url) as operation:
            waiting = beside_waiting(server.url, server.process.pid, operation, rounds)
    table = [{"up to": layer, "median ms": median} for layer, median in medians.items()]
    notes = [
        "worker: the model's own time, in the process that serves it, one pass right after the other; with pauses: one "
        "every 10 ms. sdk alone: against a server that does nothing.",
        f"Processor time of an operation through the SDK, ms: client {cpu.client:.1f}, server {cpu.server:.1f}, "
        f"worker {cpu.workers:.1f}.",
        f"{NUM_WAITING} futures that wait take {waiting.bytes_per_waiting / 1024:.0f} KiB of the server's memory each.",
    ]
    lines = [
        Line("median above the model's own time, ms", medians["sdk"] - medians["worker"], "at most", 4),
        Line(
            f"median beside {NUM_WAITING} waiting futures, of that alone",
            waiting.beside_waiting / waiting.alone,
            "at most",
            1.2,
        ),
    ]
    return Section("An empty operation: forward of one 8-token sequence", table, lines, notes)

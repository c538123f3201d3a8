"""Training through the official SDK over HTTP: one tenant against a hand-written loop, sixteen tenants against one, and
a tenant's short forward while another streams large batches.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import tinker

from ...workers.dispatch import DispatchConfig
from ..live import LiveServer
from .harness import (
    MODEL,
    RANK,
    THREADS,
    Child,
    Line,
    Row,
    Rows,
    Section,
    Setup,
    batches,
    child,
    in_turn,
    median_ratio,
    num_tokens,
    ratios,
    rest,
    spread,
    timed,
)
from .processes.clients import ADAM, Times, connect, datum, new_run

WANTED = {"16x128": 1.3, "4x512": 1.3, "16x(16..256)": 2.2, "16x(8..512)": 3.5}
STEPS, ROUND_SECONDS = 8, 6.0


class RemoteLoop:
    """The local loop's work through the official SDK: all steps are sent before the first result is awaited."""

    def __init__(self, service: tinker.ServiceClient, data: dict[str, Rows]) -> None:
        self._data = {name: [datum(row) for row in batch] for name, batch in data.items()}
        self._run = new_run(service)
        self._flops: dict[str, float] = {}

    def train(self, name: str, num_steps: int) -> float:
        """Returns the seconds that the steps took."""
        return timed(lambda: self._train(name, num_steps))

    def _train(self, name: str, num_steps: int) -> None:
        futures = []
        for _ in range(num_steps):
            futures += [self._run.forward_backward(self._data[name], "cross_entropy"), self._run.optim_step(ADAM)]
        passed, *_ = [future.result(300) for future in futures]
        self._flops[name] = passed.metrics["model_flops:sum"]

    def flops(self, name: str) -> float:
        """Returns the operations that the model needs for a step, as its results report them."""
        return self._flops[name]


def one_tenant(setup: Setup) -> Section:
    data = batches()
    with (
        child("local", "train") as local,
        setup.server("one-tenant") as server,
        connect(server.url) as service,
    ):
        local.ask({"threads": THREADS, "rank": RANK, "model": str(setup.model), "batches": data})
        remote = RemoteLoop(service, data)
        with rest(server.url) as http:
            peak = http.get("workers").raise_for_status().json()["utilization"][MODEL]["peak_flops"]
        table = [_compare(name, batch, local, remote, setup.rounds, peak) for name, batch in data.items()]
    lines = [
        Line(f"{row['batch']}, times the local loop's tokens/s", row["ratio"], "at least", WANTED[row["batch"]])
        for row in table
    ]
    notes = [
        f"Medians of {setup.rounds} rounds of up to {STEPS} steps, pipelined; the local loop pads to the longest row.",
        f"MFU: of a peak of {peak / 1e9:.0f} GFLOP/s, with the operations that the rows need without padding.",
    ]
    return Section("One tenant against a hand-written local loop", table, lines, notes)


def _compare(name: str, batch: Rows, local: Child, remote: RemoteLoop, rounds: int, peak: float) -> dict[str, Any]:
    def train_locally(steps: int) -> float:
        return local.ask({"batch": name, "steps": steps})[0]

    remote.train(name, 2)
    # Fewer where a step is long, such as on a busy machine.
    steps = max(2, min(STEPS, round(2 * ROUND_SECONDS / train_locally(2))))
    sides = {"local": lambda: train_locally(steps), "over HTTP": lambda: remote.train(name, steps)}
    seconds = in_turn(sides, rounds)
    rates = {f"{side} tokens/s": steps * num_tokens(batch) / statistics.median(seconds[side]) for side in sides}
    possible = {side: statistics.median(seconds[side]) * peak for side in sides}
    rates |= {f"{side} MFU": steps * remote.flops(name) / possible[side] for side in sides}
    ratio = spread("ratio", ratios(seconds["local"], seconds["over HTTP"]))
    return {"batch": name, "tokens": num_tokens(batch), **rates, **ratio}


# Many tenants

TENANTS, LENGTH, TENANT_STEPS = 16, 64, 30
WHOLE, ALONE, CROWD = "one tenant, 16x64", "one tenant, 1x64", "sixteen tenants, 1x64 each"

Work = Mapping[str, Any]
"""Work of one tenant, as `processes.clients` names it."""
Load = Sequence[tuple[Child, Sequence[Work]]]
"""Work that the tenants of each client process do at once."""


@dataclass(frozen=True)
class LoadResult:
    """cpu: of the server and of its worker. latencies: of the first tenant, from submit to result of its passes.

    All in seconds.
    """

    num_steps: int
    num_tokens: int
    elapsed: float
    cpu: np.ndarray
    latencies: np.ndarray

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.elapsed

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.num_tokens / float(self.cpu.sum())

    @property
    def seconds_per_step(self) -> float:
        return self.elapsed / self.num_steps


Results = Mapping[str, Sequence[LoadResult]]
"""Name of the load -> results of the rounds."""


def many_tenants(setup: Setup) -> Section:
    with (
        setup.server("many-tenants") as server,
        _tenants(server, "a", 1) as one,
        _tenants(server, "b", 8) as first,
        _tenants(server, "c", 8) as second,
    ):
        ahead = _training(1, TENANT_STEPS, in_flight=2)
        step_by_step = _training(1, TENANT_STEPS // 2, in_flight=1)
        sides = {
            WHOLE: lambda: _run(server, [(one, [_training(TENANTS, TENANT_STEPS, in_flight=4)])]),
            ALONE: lambda: _run(server, [(one, [_training(1, 2 * TENANT_STEPS, in_flight=4)])]),
            CROWD: lambda: _run(server, [(first, [step_by_step] + 7 * [ahead]), (second, 8 * [ahead])]),
        }
        results = in_turn(sides, setup.rounds, warm_ups=1)
    notes = [
        f"Medians of {setup.rounds} rounds. Tenants send two steps (forward_backward, optim_step) before they wait for",
        "the first; a tenant that is alone sends four. One of the sixteen sends a step when its last is answered: its",
        "latency is measured, from a forward_backward's submit to its result. A pass: a step of all sixteen next to",
        f"their clients; in steps of {WHOLE}, alone on the machine, the latency is {_p95_latency(results, WHOLE):.2f}.",
    ]
    table = [_row(name, of_load) for name, of_load in results.items()]
    return Section(f"{TENANTS} tenants from two client processes", table, _lines(results), notes)


@contextmanager
def _tenants(server: LiveServer, name: str, number: int) -> Iterator[Child]:
    """Starts one process of so many tenants."""
    with child("clients", "tenants") as clients:
        clients.ask({"url": server.url, "keys": [f"tml-{name}{i}" for i in range(number)]})
        yield clients


def _training(num_rows: int, num_steps: int, in_flight: int) -> Work:
    return {"work": "train", "lengths": [LENGTH] * num_rows, "steps": num_steps, "in_flight": in_flight}


def _run(server: LiveServer, load: Load) -> LoadResult:
    cpu_before = cpu_seconds(server)
    for clients, works in load:
        clients.send(works)
    tenants = [np.array(times) for clients, _ in load for times in clients.receive()]
    works = [work for _, each in load for work in each]
    return LoadResult(
        num_steps=max(map(len, tenants)),
        num_tokens=sum(len(times) * sum(work["lengths"]) for times, work in zip(tenants, works, strict=True)),
        elapsed=float(max(times.max() for times in tenants) - min(times.min() for times in tenants)),
        cpu=cpu_seconds(server) - cpu_before,
        latencies=_latencies(tenants[0]),
    )


def cpu_seconds(server: LiveServer) -> np.ndarray:
    """Returns the CPU time of the server and of all processes below it, so far, [2]."""
    process = psutil.Process(server.process.pid)
    own, *workers = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return np.array([own.user + own.system, sum(each.user + each.system for each in workers)])


def _latencies(times: np.ndarray) -> np.ndarray:
    return times[:, 1] - times[:, 0]


def _row(name: str, results: Sequence[LoadResult]) -> Row:
    server, worker = np.median([1000 * result.cpu / result.num_steps for result in results], axis=0)
    return {
        "who sends": name,
        "tokens/s": statistics.median(result.tokens_per_second for result in results),
        "ms per step": 1000 * statistics.median(result.seconds_per_step for result in results),
        "CPU ms, server": float(server),
        "CPU ms, worker": float(worker),
        "tokens per CPU-second": statistics.median(result.tokens_per_cpu_second for result in results),
        "median latency, ms": 1000 * statistics.median(float(np.median(result.latencies)) for result in results),
    }


def _lines(results: Results) -> list[Line]:
    rates = {name: [result.tokens_per_second for result in of_load] for name, of_load in results.items()}
    per_cpu = {name: [result.tokens_per_cpu_second for result in of_load] for name, of_load in results.items()}
    whole, alone = (median_ratio(rates[CROWD], rates[name]) for name in (WHOLE, ALONE))
    cpu = median_ratio(per_cpu[CROWD], per_cpu[WHOLE])
    return [
        Line(f"tokens/s of all, times those of {WHOLE}", whole, "at least", 0.65),
        Line(f"tokens/s of all, times those of {ALONE}", alone, "at least", 1.6),
        Line(f"tokens per CPU-second of the server, times those of {WHOLE}", cpu, "at least", 0.9),
        Line("p95 latency of one of the sixteen, in passes", _p95_latency(results, CROWD), "at most", 2.5),
    ]


def _p95_latency(results: Results, name: str) -> float:
    """Returns the p95 latency of one of the sixteen, in steps of the load so named in the same round."""
    pairs = zip(results[CROWD], results[name], strict=True)
    return float(np.quantile(np.concatenate([crowd.latencies / each.seconds_per_step for crowd, each in pairs]), 0.95))


# A short forward

STREAMED, FORWARD_LENGTH, CALLERS = 1000, 32, 3
ALONE_SECONDS, BOTH_SECONDS = 4.0, 10.0
PASS_TOKENS = DispatchConfig(models=()).pass_tokens


def interactive(setup: Setup) -> Section:
    with (
        setup.server("interactive") as server,
        _tenants(server, "streams", 1) as streamer,
        _tenants(server, "calls", CALLERS) as callers,
    ):
        _stream(streamer, 1)
        streamer.receive()
        _call(callers, 2, pause=0.1)
        quiet = _all_latencies(callers.receive())
        rounds = [_stream_and_call(streamer, callers) for _ in range(setup.rounds)]
    passes = np.concatenate([latencies / pass_seconds for pass_seconds, latencies in rounds])
    pass_seconds = statistics.median(seconds for seconds, _ in rounds)
    table = [
        {"forward of one sequence": name, **{f"p{p}, ms": 1000 * float(np.quantile(waits, p / 100)) for p in (50, 95)}}
        for name, waits in (("nobody else there", quiet), ("beside the stream", passes * pass_seconds))
    ]
    notes = [
        f"{setup.rounds} rounds, {len(passes)} forwards of {CALLERS} tenants, one sequence of {FORWARD_LENGTH} tokens",
        f"each, at any moment of a pass, while another tenant streams batches of {STREAMED} such sequences.",
        f"A pass: {PASS_TOKENS} tokens at the rate of the stream alone, {1000 * pass_seconds:.0f} ms.",
    ]
    line = Line("p95 of a forward next to the stream, in passes", float(np.quantile(passes, 0.95)), "at most", 2.5)
    return Section("A short forward next to a stream of large batches", table, [line], notes)


def _stream_and_call(streamer: Child, callers: Child) -> tuple[float, np.ndarray]:
    """Returns the seconds of a pass, and the latencies of forwards next to the stream."""
    _stream(streamer, ALONE_SECONDS)
    alone = np.array(streamer.receive()[0])
    pass_seconds = float(PASS_TOKENS * (alone.max() - alone.min()) / (len(alone) * STREAMED * FORWARD_LENGTH))
    _stream(streamer, BOTH_SECONDS)
    _call(callers, BOTH_SECONDS, pause=pass_seconds)
    latencies = _all_latencies(callers.receive())
    streamer.receive()
    return pass_seconds, latencies


def _stream(streamer: Child, seconds: float) -> None:
    streamer.send([{"work": "stream", "lengths": [FORWARD_LENGTH] * STREAMED, "seconds": seconds}])


def _call(callers: Child, seconds: float, pause: float) -> None:
    callers.send(CALLERS * [{"work": "forwards", "lengths": [FORWARD_LENGTH], "seconds": seconds, "pause": pause}])


def _all_latencies(answer: list[Times]) -> np.ndarray:
    return np.concatenate([_latencies(np.array(times)) for times in answer])

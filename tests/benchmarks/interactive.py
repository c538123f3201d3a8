"""One tenant's short forward while another streams large batches: how long it waits, in passes."""

import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...workers.dispatch import DispatchConfig
from ..live import live_server
from .child import Child, child
from .report import Line, Section
from .tenants import Times
from .workload import MODEL

SEQUENCES, LENGTH, CALLERS = 1000, 32, 3
ALONE_SECONDS, BOTH_SECONDS = 4.0, 10.0
PASS_TOKENS = DispatchConfig(models=()).pass_tokens


def interactive(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    with (
        live_server({MODEL: model}, scratch / "interactive", pool=pool, threads=os.cpu_count() or 1) as server,
        child("tenants") as streamer,
        child("tenants") as caller,
    ):
        streamer.ask({"url": server.url, "keys": ["tml-streams"]})
        caller.ask({"url": server.url, "keys": [f"tml-calls-{i}" for i in range(CALLERS)]})
        _stream(streamer, seconds=1).receive()
        quiet = _waits(_call(caller, seconds=2, pause=0.1).receive())
        outcomes = [_round(streamer, caller) for _ in range(rounds)]
    passes = np.concatenate([outcome.latencies / outcome.pass_seconds for outcome in outcomes])
    pass_seconds = statistics.median(outcome.pass_seconds for outcome in outcomes)
    table = [
        {"forward of one sequence": name, **{f"p{p}, ms": 1000 * float(np.quantile(waits, p / 100)) for p in (50, 95)}}
        for name, waits in (("nobody else there", quiet), ("beside the stream", passes * pass_seconds))
    ]
    notes = [
        f"{rounds} rounds, {len(passes)} forwards of {CALLERS} tenants, one sequence of {LENGTH} tokens each, at any",
        f"moment of a pass, while another tenant streams batches of {SEQUENCES} such sequences.",
        f"A pass: {PASS_TOKENS} tokens at the rate of the stream alone, {1000 * pass_seconds:.0f} ms.",
    ]
    line = Line("p95 of a forward beside the stream, in passes", float(np.quantile(passes, 0.95)), "at most", 2.5)
    return Section("A short forward beside a stream of large batches", table, [line], notes)


@dataclass(frozen=True)
class Outcome:
    """latencies: seconds from submit to result of each forward beside the stream."""

    pass_seconds: float
    latencies: np.ndarray


def _round(streamer: Child, caller: Child) -> Outcome:
    alone = np.array(_stream(streamer, ALONE_SECONDS).receive()[0])
    pass_seconds = PASS_TOKENS * (alone.max() - alone.min()) / (len(alone) * SEQUENCES * LENGTH)
    _stream(streamer, BOTH_SECONDS)
    _call(caller, BOTH_SECONDS, pause=pass_seconds)
    latencies = _waits(caller.receive())
    streamer.receive()
    return Outcome(float(pass_seconds), latencies)


def _stream(streamer: Child, seconds: float) -> Child:
    streamer.send([{"work": "stream", "lengths": [LENGTH] * SEQUENCES, "seconds": seconds}])
    return streamer


def _call(caller: Child, seconds: float, pause: float) -> Child:
    caller.send(CALLERS * [{"work": "forwards", "lengths": [LENGTH], "seconds": seconds, "pause": pause}])
    return caller


def _waits(answer: list[Times]) -> np.ndarray:
    times = np.concatenate([np.array(each) for each in answer])
    return times[:, 1] - times[:, 0]

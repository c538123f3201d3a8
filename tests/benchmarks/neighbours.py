"""A tenant's steps alone, and while another tenant sends constraints that are costly to compile, or many requests."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from ..letters import letter_tokenizer
from .harness import Child, Line, Row, Section, Setup, child, in_turn, ratios, spread
from .processes.clients import Times

ALONE, READS = "alone", "32 callers read"
LENGTHS, SECONDS = [64] * 16, 3.0
TOKENIZED = 512


def neighbours(setup: Setup) -> Section:
    letter_tokenizer(TOKENIZED).save_pretrained(setup.model)
    ends: dict[str, Counter[str]] = {}
    with (
        setup.server("neighbours") as server,
        child("clients", "tenants") as trains,
        child("neighbours", server.url) as neighbour,
    ):
        trains.ask({"url": server.url, "keys": ["tml-trains"]})
        names = [ALONE, *neighbour.receive()]

        def side(name: str) -> Callable[[], Times]:
            counted = ends.setdefault(name, Counter())
            return lambda: _steps(trains, nullcontext() if name == ALONE else _loaded(neighbour, name, counted))

        rounds = in_turn({name: side(name) for name in names}, setup.rounds, warm_ups=1)
    seconds = {name: [_seconds_per_step(times) for times in of_side] for name, of_side in rounds.items()}
    table = [_row(name, rounds[name], ratios(seconds[name], seconds[ALONE]), ends[name]) for name in names]
    lines = [
        Line(f"time of a step next to: {row['beside']}, times that alone", float(row["ratio"] or 0), "at most", 2)
        for row in table[1:]
        if row["beside"] != READS
    ]
    notes = [
        f"Medians of {setup.rounds} rounds of {SECONDS:g} s, in turn; a step is a forward_backward of {len(LENGTHS)}x"
        f"{LENGTHS[0]} tokens and an optim_step, sent when the one before is answered.",
        "Each constraint is new, two are in flight, each of another tenant. The row of readers",
        "(get_info) shows what any 32 callers cost: here they, the server and the worker use the same cores.",
    ]
    return Section("A tenant's steps next to another's costly requests", table, lines, notes)


def _steps(trains: Child, load: Iterator[None]) -> Times:
    with load:
        return trains.ask([{"work": "steps", "lengths": LENGTHS, "seconds": SECONDS}])[0]


@contextmanager
def _loaded(neighbour: Child, name: str, ends: Counter[str]) -> Iterator[None]:
    print(name, flush=True)
    neighbour.ask(name)
    try:
        yield
    finally:
        ends.update(neighbour.ask("stop"))


def _seconds_per_step(times: Times) -> float:
    return (times[-1][1] - times[0][0]) / len(times)


def _row(name: str, rounds: list[Times], of_alone: list[float], ends: Counter[str]) -> Row:
    steps = [answered - submitted for times in rounds for submitted, answered in times]
    return {
        "beside": name,
        "ms per step": 1000 * statistics.median(map(_seconds_per_step, rounds)),
        **spread("ratio", of_alone),
        "slowest, ms": 1000 * max(steps),
        "the requests": ", ".join(f"{num} {end}" for end, num in sorted(ends.items())),
    }

"""A reference's forward beside a policy's forward_backward: in groups of their own they take the time of the longer
one, in one group that of both, and where groups take turns that and the moving. Each worker has one thread.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from trainhouse import Datum, ServiceClient, TrainingClient

from ..live import live_server
from .report import Line, Section
from .workload import MODEL, RANK, num_tokens, rows

# A forward takes about a third of a forward and a backward.
TRAINED, SCORED = rows([128] * 32, seed=1), rows([128] * 88, seed=2)
MOST_TIMES = 1.15
# Of a core: rounds in which others take more do not count, and there are so many times the rounds at the most.
MOST_OTHERS, MOST_TRIES = 0.2, 4

POLICY, REFERENCE = "the policy's forward_backward alone", "the reference's forward alone"
APART, IN_ONE = "both, in groups of their own", "both, in one group"
IN_TURN = "both, in groups that take turns"


@dataclass(frozen=True)
class Timed:
    """others: cores that work of others took meanwhile."""

    seconds: float
    others: float


Round = Mapping[str, Timed]


@dataclass(frozen=True)
class Runs:
    policy: TrainingClient
    reference: TrainingClient

    def train(self) -> None:
        self.policy.forward_backward(_data(TRAINED), "cross_entropy").result(600)

    def score(self) -> None:
        self.reference.forward(_data(SCORED), "cross_entropy").result(600)

    def do_both(self) -> None:
        training = self.policy.forward_backward(_data(TRAINED), "cross_entropy")
        scoring = self.reference.forward(_data(SCORED), "cross_entropy")
        training.result(600)
        scoring.result(600)


def roles_apart(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    with ExitStack() as stack:
        apart = _started(model, scratch / "apart", pool, stack, {"role_group": "reference=single"})
        in_one = _started(model, scratch / "in-one", pool, stack, {})
        turns = {"role_group": "reference=single", "shared_devices": "turns"}
        in_turn = _started(model, scratch / "in-turn", pool, stack, turns)
        sides: dict[str, Callable[[], None]] = {
            POLICY: apart.train,
            REFERENCE: apart.score,
            APART: apart.do_both,
            IN_ONE: in_one.do_both,
            IN_TURN: in_turn.do_both,
        }
        _round(sides, 0)  # warms up
        found: list[Round] = []
        while len(_undisturbed(found)) < rounds and len(found) < MOST_TRIES * rounds:
            found.append(_round(sides, len(found)))
    return _section(_undisturbed(found) or found, len(found))


def _started(model: Path, directory: Path, pool: str, stack: ExitStack, options: dict[str, str]) -> Runs:
    """By a server of their own."""
    server = stack.enter_context(live_server({MODEL: model}, directory, pool, threads=1, **options))
    service = stack.enter_context(ServiceClient(server.url, "tml-bench"))
    policy = service.create_lora_training_client(MODEL, rank=RANK, seed=0, train_unembed=False)
    return Runs(policy, service.create_reference_client(base_model=MODEL))


def _round(sides: Mapping[str, Callable[[], None]], number: int) -> Round:
    """Each is first in its turn."""
    names, start = list(sides), number % len(sides)
    return {name: _timed(sides[name]) for name in names[start:] + names[:start]}


def _undisturbed(found: Sequence[Round]) -> list[Round]:
    return [each for each in found if max(timed.others for timed in each.values()) < MOST_OTHERS]


def _data(token_rows: list[list[int]]) -> list[Datum]:
    return [Datum(row[:-1], {"target_tokens": row[1:], "weights": np.ones(len(row) - 1)}) for row in token_rows]


def _timed(work: Callable[[], None]) -> Timed:
    started, before = time.perf_counter(), _cpu_of_others()
    work()
    seconds = time.perf_counter() - started
    return Timed(seconds, (_cpu_of_others() - before) / seconds)


def _cpu_of_others() -> float:
    """Seconds so far, but for those of this process and all below it."""
    all_times, this = psutil.cpu_times(), psutil.Process()
    ours = [each.cpu_times() for each in (this, *this.children(recursive=True))]
    return sum(all_times) - all_times.idle - all_times.iowait - sum(times.user + times.system for times in ours)


def _section(counted: Sequence[Round], num_rounds: int) -> Section:
    seconds = {name: np.array([each[name].seconds for each in counted]) for name in counted[0]}
    longer, both = np.maximum(seconds[POLICY], seconds[REFERENCE]), seconds[POLICY] + seconds[REFERENCE]
    table = [
        {
            "what": name,
            "seconds": statistics.median(times),
            "times the longer one": statistics.median(times / longer),
            "lowest round": min(times / longer),
            "highest round": max(times / longer),
            "times the sum": statistics.median(times / both),
            "cores others took": statistics.median(each[name].others for each in counted),
        }
        for name, times in seconds.items()
    ]
    found = statistics.median(seconds[APART] / longer)
    lines = [Line("a reference's forward beside the policy's pass: times the longer one", found, "at most", MOST_TIMES)]
    notes = [
        f"Medians of {len(counted)} of {num_rounds} rounds: of those in which others took less than {MOST_OTHERS:g}",
        f"cores, where there are such. cross_entropy of {num_tokens(TRAINED)} tokens with gradients, and of",
        f"{num_tokens(SCORED)} without, in rows of 128; a worker of one thread for each group, which needs a core of",
        f"its own: there are {psutil.cpu_count()}, less what others took. In turn, one base model at a time is in",
        "memory, the other on disk.",
    ]
    return Section("A reference in a group of its own", table, lines, notes)

"""Work that overlaps: two RL runs on one worker, of which one trains while the other samples; and a reference's forward
while a policy trains, in separate groups, in one group, and in groups that take turns.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter

import numpy as np
import psutil
import tinker
from tinker import types
from trainhouse import Datum, ServiceClient

from .harness import (
    KEY,
    MODEL,
    RANK,
    VOCAB,
    Line,
    Section,
    Setup,
    in_turn,
    num_tokens,
    one_round,
    prompts,
    ratios,
    rows,
    spread,
    timed,
)
from .processes.clients import connect, new_run, sdk_datum

PROMPTS, SAMPLES, LENGTH = 4, 4, 32
STEPS = 2
ADAM = types.AdamParams(learning_rate=1e-3)
PARAMS = types.SamplingParams(max_tokens=LENGTH, temperature=1.0, stop=[])


class Policy:
    """A policy that learns to name small tokens."""

    def __init__(self, service: tinker.ServiceClient, seed: int) -> None:
        self._run = new_run(service, seed)
        self._prompts = prompts(PROMPTS, LENGTH, seed)
        self._batch: list[types.Datum] = []
        asyncio.run(self.sample())

    async def sample(self) -> None:
        """Samples with the present weights what the next `train` trains on."""
        sampler = await self._run.save_weights_and_get_sampling_client()
        inputs = [types.ModelInput.from_ints(prompt) for prompt in self._prompts]
        responses = await asyncio.gather(*(sampler.sample(each, SAMPLES, PARAMS) for each in inputs))
        groups = zip(self._prompts, responses, strict=True)
        self._batch = [datum for prompt, response in groups for datum in _data(prompt, response.sequences)]

    async def train(self) -> None:
        passed, stepped = self._run.forward_backward(self._batch, "ppo"), self._run.optim_step(ADAM)
        await passed
        await stepped

    async def take_step(self) -> None:
        await self.sample()
        await self.train()


def _data(prompt: list[int], sequences: Sequence[types.SampledSequence]) -> Iterator[types.Datum]:
    """The advantage of a sample is its reward above the mean of its prompt's samples."""
    rewards = [float(np.mean(np.array(each.tokens) < VOCAB / 2)) for each in sequences]
    for sequence, reward in zip(sequences, rewards, strict=True):
        assert sequence.logprobs is not None and len(sequence.tokens) == LENGTH
        tokens, ahead = prompt + list(sequence.tokens), [0.0] * (len(prompt) - 1)
        inputs = {
            "target_tokens": np.array(tokens[1:], dtype=np.int64),
            "logprobs": np.array(ahead + list(sequence.logprobs), dtype=np.float32),
            "advantages": np.array(ahead + [reward - np.mean(rewards)] * LENGTH, dtype=np.float32),
        }
        yield sdk_datum(tokens[:-1], inputs)


async def _in_turn(one: Policy, other: Policy) -> None:
    for _ in range(STEPS):
        await one.take_step()
        await other.take_step()


async def _opposite(one: Policy, other: Policy) -> None:
    for _ in range(STEPS):
        await asyncio.gather(one.sample(), other.train())
        await asyncio.gather(one.train(), other.sample())


async def _side_by_side(one: Policy, other: Policy) -> None:
    async def take_steps(policy: Policy) -> None:
        for _ in range(STEPS):
            await policy.take_step()

    await asyncio.gather(take_steps(one), take_steps(other))


IN_TURN, OPPOSITE, SIDE_BY_SIDE = "in turn", "one trains while the other samples", "side by side"
ORDERS: dict[str, Callable[[Policy, Policy], Awaitable[None]]] = {
    IN_TURN: _in_turn,
    OPPOSITE: _opposite,
    SIDE_BY_SIDE: _side_by_side,
}


def overlap(setup: Setup) -> Section:
    with setup.server("overlap") as server, connect(server.url) as service:
        one, other = (Policy(service, seed) for seed in range(2))

        def side(order: Callable[[Policy, Policy], Awaitable[None]]) -> Callable[[], float]:
            pairs = cycle([(one, other), (other, one)])
            return lambda: timed(lambda: asyncio.run(order(*next(pairs))))

        seconds = in_turn({name: side(order) for name, order in ORDERS.items()}, setup.rounds, warm_ups=1)
    times = {name: ratios(seconds[name], seconds[IN_TURN]) for name in ORDERS}
    table = [
        {"two runs": name, "seconds": statistics.median(seconds[name]), **spread("times in turn", times[name])}
        for name in ORDERS
    ]
    lines = [
        Line(f"two runs, {name}: times the time in turn", statistics.median(times[name]), "at most", 1.05)
        for name in (OPPOSITE, SIDE_BY_SIDE)
    ]
    notes = [
        f"Medians of {setup.rounds} rounds, {STEPS} steps of each run: {PROMPTS}x{SAMPLES} samples of {LENGTH} tokens,",
        f"after prompts of {LENGTH} and with the weights of the moment, then ppo on all of them, then the step.",
    ]
    return Section("Training and sampling at the same time", table, lines, notes)


# A policy and a reference

# A forward takes about a third of a forward and a backward.
TRAINED, SCORED = rows([128] * 32, seed=1), rows([128] * 88, seed=2)
MAX_TIMES = 1.15
# CPU of others, in cores: rounds with more do not count, and the rounds are at most so many times as many.
MAX_OTHERS, MAX_TRIES = 0.2, 4

POLICY, REFERENCE = "the policy's forward_backward alone", "the reference's forward alone"
APART, IN_ONE = "both, in groups of their own", "both, in one group"
TAKING_TURNS = "both, in groups that take turns"


@dataclass(frozen=True)
class Timed:
    """others: cores that other processes took meanwhile."""

    seconds: float
    others: float


Round = Mapping[str, Timed]


class Pair:
    """A policy and a reference on a server of their own."""

    def __init__(self, stack: ExitStack, setup: Setup, name: str, **options: str) -> None:
        server = stack.enter_context(setup.server(name, threads=1, **options))
        service = stack.enter_context(ServiceClient(server.url, KEY))
        self._policy = service.create_lora_training_client(MODEL, rank=RANK, seed=0, train_unembed=False)
        self._reference = service.create_reference_client(base_model=MODEL)

    def train(self) -> None:
        self._policy.forward_backward(_weighted(TRAINED), "cross_entropy").result(600)

    def score(self) -> None:
        self._reference.forward(_weighted(SCORED), "cross_entropy").result(600)

    def do_both(self) -> None:
        training = self._policy.forward_backward(_weighted(TRAINED), "cross_entropy")
        scoring = self._reference.forward(_weighted(SCORED), "cross_entropy")
        training.result(600)
        scoring.result(600)


def _weighted(token_rows: list[list[int]]) -> list[Datum]:
    return [Datum(row[:-1], {"target_tokens": row[1:], "weights": np.ones(len(row) - 1)}) for row in token_rows]


def roles_apart(setup: Setup) -> Section:
    with ExitStack() as stack:
        apart = Pair(stack, setup, "apart", role_group="reference=single")
        in_one = Pair(stack, setup, "in-one")
        turns = Pair(stack, setup, "in-turn", role_group="reference=single", shared_devices="turns")
        works = {
            POLICY: apart.train,
            REFERENCE: apart.score,
            APART: apart.do_both,
            IN_ONE: in_one.do_both,
            TAKING_TURNS: turns.do_both,
        }
        sides = {name: lambda work=work: _timed(work) for name, work in works.items()}
        one_round(sides, 0)  # warms up
        found: list[Round] = []
        while len(_undisturbed(found)) < setup.rounds and len(found) < MAX_TRIES * setup.rounds:
            found.append(one_round(sides, len(found)))
    return _section(_undisturbed(found) or found, len(found))


def _undisturbed(found: Sequence[Round]) -> list[Round]:
    return [each for each in found if max(timed.others for timed in each.values()) < MAX_OTHERS]


def _timed(work: Callable[[], None]) -> Timed:
    started, before = perf_counter(), _cpu_of_others()
    work()
    seconds = perf_counter() - started
    return Timed(seconds, (_cpu_of_others() - before) / seconds)


def _cpu_of_others() -> float:
    """Returns the machine's CPU seconds so far, without those of this process and all below it."""
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
            **spread("times the longer one", ratios(times, longer)),
            "times the sum": statistics.median(times / both),
            "cores others took": statistics.median(each[name].others for each in counted),
        }
        for name, times in seconds.items()
    ]
    found = statistics.median(seconds[APART] / longer)
    lines = [Line("reference's forward next to the policy's pass: times the longer one", found, "at most", MAX_TIMES)]
    notes = [
        f"Medians of {len(counted)} of {num_rounds} rounds: of those in which others took less than {MAX_OTHERS:g}",
        f"cores, if any. cross_entropy of {num_tokens(TRAINED)} tokens with gradients, and of {num_tokens(SCORED)}",
        "without, in rows of 128; a worker of one thread for each group, which needs a core of its own: the machine",
        f"has {psutil.cpu_count()}, less what others took. In turn, one base model at a time is in memory, the other",
        "on disk.",
    ]
    return Section("A reference in a group of its own", table, lines, notes)

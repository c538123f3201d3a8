"""Two runs of reinforcement learning on one worker, through the official SDK: in turn, and one training while the other
samples. Work that overlaps must not take longer than the same work in turn.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import tinker
from tinker import types

from ..live import live_server
from .report import Line, Section
from .workload import MODEL, RANK, VOCAB, rows

PROMPTS, SAMPLES, LENGTH = 4, 4, 32
STEPS = 2
ADAM = types.AdamParams(learning_rate=1e-3)
PARAMS = types.SamplingParams(max_tokens=LENGTH, temperature=1.0, stop=[])


T = TypeVar("T")


@dataclass
class Run:
    """A policy that learns to name small tokens. batch: sampled and not trained on yet."""

    client: tinker.TrainingClient
    prompts: list[list[int]]
    batch: list[types.Datum]

    async def sample(self) -> None:
        """With the weights of now."""
        sampler = await self.client.save_weights_and_get_sampling_client()
        inputs = [types.ModelInput.from_ints(prompt) for prompt in self.prompts]
        responses = await asyncio.gather(*(sampler.sample(each, SAMPLES, PARAMS) for each in inputs))
        self.batch = [
            datum
            for prompt, response in zip(self.prompts, responses, strict=True)
            for datum in _datums(prompt, response.sequences)
        ]

    async def train(self) -> None:
        passed, stepped = self.client.forward_backward(self.batch, "ppo"), self.client.optim_step(ADAM)
        await passed
        await stepped


def _datums(prompt: list[int], sequences: Sequence[types.SampledSequence]) -> list[types.Datum]:
    """The advantage of a sample is its reward above the mean of its prompt's."""
    rewards = [float(np.mean(np.array(each.tokens) < VOCAB / 2)) for each in sequences]
    advantages = np.array(rewards) - np.mean(rewards)
    return [_datum(prompt, each, float(a)) for each, a in zip(sequences, advantages, strict=True)]


def _datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    tokens, ahead = prompt + list(sequence.tokens), len(prompt) - 1
    assert sequence.logprobs is not None and len(sequence.tokens) == LENGTH
    inputs = {
        "target_tokens": np.array(tokens[1:], dtype=np.int64),
        "logprobs": np.array([0.0] * ahead + list(sequence.logprobs), dtype=np.float32),
        "advantages": np.array([0.0] * ahead + [advantage] * LENGTH, dtype=np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


async def _in_turn(one: Run, other: Run) -> None:
    for _ in range(STEPS):
        for run in (one, other):
            await run.sample()
            await run.train()


async def _opposite(one: Run, other: Run) -> None:
    """One samples while the other trains on what it sampled before."""
    for _ in range(STEPS):
        await asyncio.gather(one.sample(), other.train())
        await asyncio.gather(one.train(), other.sample())


async def _side_by_side(one: Run, other: Run) -> None:
    """Each goes on as it can."""

    async def steps(run: Run) -> None:
        for _ in range(STEPS):
            await run.sample()
            await run.train()

    await asyncio.gather(steps(one), steps(other))


IN_TURN, OPPOSITE, SIDE_BY_SIDE = "in turn", "one trains while the other samples", "side by side"
SIDES: dict[str, Callable[[Run, Run], Coroutine[object, object, None]]] = {
    IN_TURN: _in_turn,
    OPPOSITE: _opposite,
    SIDE_BY_SIDE: _side_by_side,
}


def overlap(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    threads = os.cpu_count() or 1
    with (
        live_server({MODEL: model}, scratch / "overlap", pool=pool, threads=threads) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-bench") as service,
    ):
        runs = [_new_run(service, seed) for seed in range(2)]
        seconds: dict[str, list[float]] = {name: [] for name in SIDES}
        for number in range(1 + rounds):
            for name in _rotated(list(SIDES), number):
                seconds[name].append(_timed(SIDES[name](*_rotated(runs, number))))
    # The first round warms up.
    return _section({name: times[1:] for name, times in seconds.items()}, rounds)


def _new_run(service: tinker.ServiceClient, seed: int) -> Run:
    client = service.create_lora_training_client(MODEL, rank=RANK, seed=seed, train_unembed=False).result(60)
    run = Run(client, [row[:LENGTH] for row in rows([LENGTH] * PROMPTS, seed)], [])
    asyncio.run(run.sample())
    return run


def _rotated(items: list[T], number: int) -> list[T]:
    """So that each is first in its turn."""
    start = number % len(items)
    return items[start:] + items[:start]


def _timed(work: Coroutine[object, object, None]) -> float:
    started = time.perf_counter()
    asyncio.run(work)
    return time.perf_counter() - started


def _section(seconds: dict[str, list[float]], rounds: int) -> Section:
    ratios = {
        name: [mine / in_turn for mine, in_turn in zip(seconds[name], seconds[IN_TURN], strict=True)] for name in SIDES
    }
    table = [
        {
            "two runs": name,
            "seconds": statistics.median(seconds[name]),
            "times in turn": statistics.median(ratios[name]),
            "lowest round": min(ratios[name]),
            "highest round": max(ratios[name]),
        }
        for name in SIDES
    ]
    lines = [
        Line(f"two runs, {name}: times the time in turn", statistics.median(ratios[name]), "at most", 1.05)
        for name in (OPPOSITE, SIDE_BY_SIDE)
    ]
    notes = [
        f"Medians of {rounds} rounds, {STEPS} steps of each run: {PROMPTS}x{SAMPLES} samples of {LENGTH} tokens, after",
        f"prompts of {LENGTH} and with the weights of the moment, then ppo on all of them, then the step.",
    ]
    return Section("Training and sampling at the same time", table, lines, notes)

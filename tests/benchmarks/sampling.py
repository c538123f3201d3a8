"""Sampling through the official SDK over HTTP against transformers' `generate` in process: a full batch, clients that
come and go, one short request, and many adapters in one batch.
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import tinker
from tinker import types

from ..live import live_server
from .child import Child, child
from .report import Line, Section
from .workload import MODEL, RANK, datum, rows

PROMPTS, SAMPLES, LENGTH = 8, 4, 64
CLIENTS, ADAPTERS = 64, 8
SHORT = 16
ADAM = types.AdamParams(learning_rate=1e-3)

Sampler = tinker.SamplingClient

_seeds = count()


def sampling(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    threads = os.cpu_count() or 1
    with ExitStack() as stack:
        local = stack.enter_context(child("local_generate"))
        server = stack.enter_context(live_server({MODEL: model}, scratch / "sampling", pool=pool, threads=threads))
        service = stack.enter_context(tinker.ServiceClient(base_url=server.url, api_key="tml-bench"))
        local.ask({"threads": threads, "model": str(model), "rank": RANK, "prompts": new_prompts(PROMPTS)})
        trainers = [
            service.create_lora_training_client(MODEL, rank=RANK, seed=seed, train_unembed=False).result(60)
            for seed in range(ADAPTERS)
        ]
        samplers = [trainer.save_weights_and_get_sampling_client().result(60) for trainer in trainers]
        sides = _sides(local, samplers)
        for measure in sides.values():
            measure()
        seconds = {name: [] for name in sides}
        for _ in range(rounds):
            for name, measure in sides.items():
                seconds[name].append(measure())
        fresh = [_fresh_sampler(trainers[0], new_prompts(2)) for _ in range(4 * rounds)]
    return _section(Outcome(seconds, fresh), rounds)


@dataclass(frozen=True)
class Outcome:
    """seconds: by side, of each round. fresh: of a first token from a sampler just made, and of one more token."""

    seconds: dict[str, list[float]]
    fresh: list[tuple[float, float]]

    def rate(self, name: str, num_tokens: int) -> list[float]:
        return [num_tokens / each for each in self.seconds[name]]


BATCH, BATCH_LOCAL = "8x4 samples of 64", "8x4 samples of 64, generate"
MIXED = "8x4 samples of 64, 8 adapters"
RAGGED, RAGGED_ONE = "64 clients of 4 samples, ragged", "64 clients of 1 sample, ragged"
ONE, ONE_LOCAL = "1 sample of 16", "1 sample of 16, generate"


def _sides(local: Child, samplers: list[Sampler]) -> dict[str, Callable[[], float]]:
    """Name -> a measurement of its seconds."""
    first = samplers[0]

    def generate(num_prompts: int, num_samples: int, max_tokens: int) -> Callable[[], float]:
        asked = {"num_prompts": num_prompts, "num_samples": num_samples, "max_tokens": max_tokens}
        return lambda: local.ask(asked)

    return {
        BATCH_LOCAL: generate(PROMPTS, SAMPLES, LENGTH),
        BATCH: lambda: batch_seconds([first] * PROMPTS, new_prompts(PROMPTS)),
        MIXED: lambda: batch_seconds(samplers, new_prompts(PROMPTS)),
        RAGGED: lambda: _timed(lambda: _ragged(first, SAMPLES)),
        RAGGED_ONE: lambda: _timed(lambda: _ragged(first, 1)),
        ONE_LOCAL: generate(1, 1, SHORT),
        ONE: lambda: _timed(lambda: _sample(first, new_prompts(1)[0], 1, SHORT)),
    }


def new_prompts(number: int) -> list[list[int]]:
    """That no sampler has seen: what it keeps of earlier ones is not measured here."""
    return [row[:LENGTH] for row in rows([LENGTH] * number, seed=next(_seeds))]


def batch_seconds(samplers: list[Sampler], prompts: list[list[int]]) -> float:
    """Of a request for each prompt, all at once."""
    requests = list(zip(samplers, prompts, strict=True))
    return _timed(lambda: _all([_sample(sampler, prompt, SAMPLES, LENGTH) for sampler, prompt in requests]))


def _timed(work: Callable[[], Coroutine[object, object, object]]) -> float:
    async def run() -> float:
        started = time.perf_counter()
        await work()
        return time.perf_counter() - started

    return asyncio.run(run())


async def _all(works: list[Coroutine[object, object, object]]) -> None:
    await asyncio.gather(*works)


async def _sample(sampler: Sampler, prompt: list[int], num_samples: int, max_tokens: int) -> None:
    # No stop: every sample has all its tokens, on both sides.
    params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0, stop=[])
    response = await sampler.sample_async(types.ModelInput.from_ints(prompt), num_samples, params)
    assert [len(sequence.tokens) for sequence in response.sequences] == [max_tokens] * num_samples
    assert all(sequence.logprobs is not None for sequence in response.sequences)


def _ragged_requests() -> list[tuple[list[int], int]]:
    """The prompt and the tokens wanted of each client's requests: 64 of each on average."""
    drawn = random.Random(0)
    lengths = [drawn.randint(16, 112) for _ in range(CLIENTS)]
    return [(row[:-1], drawn.randint(16, 112)) for row in rows(lengths, seed=next(_seeds))]


async def _ragged(sampler: Sampler, num_samples: int) -> None:
    """Every client sends a request at a moment of its own in the time that a batch takes."""
    drawn = random.Random(1)

    async def client(prompt: list[int], max_tokens: int) -> None:
        await asyncio.sleep(drawn.uniform(0, 0.3))
        await _sample(sampler, prompt, num_samples, max_tokens)

    await _all([client(prompt, max_tokens) for prompt, max_tokens in _ragged_requests()])


def _fresh_sampler(trainer: tinker.TrainingClient, prompts: list[list[int]]) -> tuple[float, float]:
    """Seconds until the first token of weights just trained, and of another prompt's."""
    trainer.forward_backward([datum(prompts[0])], "cross_entropy").result(60)
    trainer.optim_step(ADAM).result(60)
    started = time.perf_counter()
    sampler = trainer.save_weights_and_get_sampling_client().result(60)
    asyncio.run(_sample(sampler, prompts[0], 1, 1))
    first = time.perf_counter()
    asyncio.run(_sample(sampler, prompts[1], 1, 1))
    return first - started, time.perf_counter() - first


def _section(outcome: Outcome, rounds: int) -> Section:
    in_batch, ragged = PROMPTS * SAMPLES * LENGTH, sum(max_tokens for _, max_tokens in _ragged_requests())
    num_tokens = {
        BATCH_LOCAL: in_batch,
        BATCH: in_batch,
        MIXED: in_batch,
        RAGGED: SAMPLES * ragged,
        RAGGED_ONE: ragged,
        ONE_LOCAL: SHORT,
        ONE: SHORT,
    }
    rates = {name: outcome.rate(name, num_tokens[name]) for name in num_tokens}
    table = [
        {
            "what": name,
            "tokens/s": statistics.median(rates[name]),
            "ms": 1000 * statistics.median(outcome.seconds[name]),
        }
        for name in num_tokens
    ]

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))

    late = 1000 * statistics.median(fresh - again for fresh, again in outcome.fresh)
    lines = [
        Line("8x4 samples of 64, times generate's tokens/s", ratio(BATCH, BATCH_LOCAL), "at least", 2.0),
        Line("64 clients that come and go, times the full batch's tokens/s", ratio(RAGGED, BATCH), "at least", 0.8),
        Line("one request of 16 tokens, times generate's time", ratio(ONE_LOCAL, ONE), "at most", 1.1),
        Line("8 adapters in one batch, times one adapter's tokens/s", ratio(MIXED, BATCH), "at least", 0.7),
        Line("first token of weights just trained, ms above another token", late, "at most", 30),
    ]
    notes = [
        f"Medians of {rounds} rounds; prompts of {LENGTH} tokens, temperature 1, log-probabilities on. Ragged: prompts",
        "and samples of 16 to 112 tokens, arriving within 0.3 s. A client of 4 samples asks for as many tokens to a",
        "prompt as the batch does; one of 1 sample has four times the prompt to prefill for each token.",
    ]
    return Section("Sampling against transformers' generate", table, lines, notes)

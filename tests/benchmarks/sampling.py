"""Sampling through the official SDK over HTTP against transformers' `generate` in process, and against vLLM.

Cases: a full batch, clients that arrive and leave, one short request, many adapters in one batch. The comparison with
vLLM (`make bench-vllm`) needs TRAINHOUSE_VLLM_PYTHON, a Python that has vLLM, and heads of 32, since vLLM's attention
on CPUs supports none of 16.
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import tinker
from tinker import types

from ..tiny import tiny_model
from .harness import (
    RANK,
    SHAPE,
    THREADS,
    Child,
    Line,
    Rows,
    Section,
    Setup,
    child,
    in_turn,
    median_ratio,
    prompts,
    rows,
    running,
    timed,
)
from .processes.clients import connect, datum, new_run

PROMPTS, SAMPLES, LENGTH = 8, 4, 64
CLIENTS, ADAPTERS = 64, 8
SHORT = 16
ADAM = types.AdamParams(learning_rate=1e-3)

Sampler = tinker.SamplingClient


def _ragged_lengths() -> list[tuple[int, int]]:
    """Returns the prompt's length and the tokens that each client requests: 64 of each on average."""
    drawn = random.Random(0)
    lengths = [drawn.randint(16, 112) for _ in range(CLIENTS)]
    return [(length, drawn.randint(16, 112)) for length in lengths]


BATCH, BATCH_LOCAL = "8x4 samples of 64", "8x4 samples of 64, generate"
MIXED = "8x4 samples of 64, 8 adapters"
RAGGED, RAGGED_ONE = "64 clients of 4 samples, ragged", "64 clients of 1 sample, ragged"
ONE, ONE_LOCAL = "1 sample of 16", "1 sample of 16, generate"
RAGGED_LENGTHS = _ragged_lengths()
IN_BATCH, IN_RAGGED = PROMPTS * SAMPLES * LENGTH, sum(max_tokens for _, max_tokens in RAGGED_LENGTHS)
NUM_TOKENS = {
    BATCH_LOCAL: IN_BATCH,
    BATCH: IN_BATCH,
    MIXED: IN_BATCH,
    RAGGED: SAMPLES * IN_RAGGED,
    RAGGED_ONE: IN_RAGGED,
    ONE_LOCAL: SHORT,
    ONE: SHORT,
}


class Prompts:
    """Hands out prompts that no sampler has seen, so that prefix caches do not matter."""

    def __init__(self) -> None:
        self._seeds = count()

    def new(self, number: int) -> Rows:
        return prompts(number, LENGTH, next(self._seeds))

    def new_of(self, lengths: Iterable[int]) -> Rows:
        return [row[:-1] for row in rows(lengths, next(self._seeds))]


def sampling(setup: Setup) -> Section:
    unseen = Prompts()
    with (
        child("local", "generate") as local,
        setup.server("sampling") as server,
        connect(server.url) as service,
    ):
        local.ask({"threads": THREADS, "model": str(setup.model), "rank": RANK, "prompts": unseen.new(PROMPTS)})
        runs = [new_run(service, seed) for seed in range(ADAPTERS)]
        samplers = [run.save_weights_and_get_sampling_client().result(60) for run in runs]
        seconds = in_turn(_sides(local, samplers, unseen), setup.rounds, warm_ups=1)
        late = [_seconds_late(runs[0], *unseen.new(2)) for _ in range(4 * setup.rounds)]
    return _section(seconds, 1000 * statistics.median(late), setup.rounds)


def _sides(local: Child, samplers: list[Sampler], unseen: Prompts) -> dict[str, Callable[[], float]]:
    """Returns a function for each side that samples and returns the seconds it took."""
    first = samplers[0]

    def generate(num_prompts: int, num_samples: int, max_tokens: int) -> Callable[[], float]:
        asked = {"num_prompts": num_prompts, "num_samples": num_samples, "max_tokens": max_tokens}
        return lambda: local.ask(asked)[0]

    return {
        BATCH_LOCAL: generate(PROMPTS, SAMPLES, LENGTH),
        BATCH: lambda: sample_batch([first] * PROMPTS, unseen),
        MIXED: lambda: sample_batch(samplers, unseen),
        RAGGED: lambda: _ragged_seconds(first, SAMPLES, unseen),
        RAGGED_ONE: lambda: _ragged_seconds(first, 1, unseen),
        ONE_LOCAL: generate(1, 1, SHORT),
        ONE: lambda: _seconds([_sample(first, *unseen.new(1), 1, SHORT)]),
    }


def sample_batch(samplers: list[Sampler], unseen: Prompts) -> float:
    """Returns the seconds that samples of a new prompt from each took."""
    pairs = zip(samplers, unseen.new(len(samplers)), strict=True)
    return _seconds([_sample(sampler, prompt, SAMPLES, LENGTH) for sampler, prompt in pairs])


def _ragged_seconds(sampler: Sampler, num_samples: int, unseen: Prompts) -> float:
    """Returns the seconds until requests that arrive at random within 0.3 s have been answered."""
    drawn = random.Random(1)

    async def sample(prompt: list[int], max_tokens: int, delay: float) -> None:
        await asyncio.sleep(delay)
        await _sample(sampler, prompt, num_samples, max_tokens)

    ragged = unseen.new_of(length for length, _ in RAGGED_LENGTHS)
    requests = zip(ragged, RAGGED_LENGTHS, strict=True)
    return _seconds([sample(prompt, max_tokens, drawn.uniform(0, 0.3)) for prompt, (_, max_tokens) in requests])


def _seconds(works: list[Coroutine[object, object, None]]) -> float:
    """Runs all concurrently and returns the seconds they took."""

    async def run() -> None:
        await asyncio.gather(*works)

    return timed(lambda: asyncio.run(run()))


async def _sample(sampler: Sampler, prompt: list[int], num_samples: int, max_tokens: int) -> None:
    # No stop: every sample has all its tokens, on both sides.
    params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0, stop=[])
    response = await sampler.sample_async(types.ModelInput.from_ints(prompt), num_samples, params)
    assert [len(sequence.tokens) for sequence in response.sequences] == [max_tokens] * num_samples
    assert all(sequence.logprobs is not None for sequence in response.sequences)


def _seconds_late(run: tinker.TrainingClient, first: list[int], second: list[int]) -> float:
    """Returns how many seconds longer the first token takes with weights just trained than with another prompt."""
    run.forward_backward([datum(first)], "cross_entropy").result(60)
    run.optim_step(ADAM).result(60)
    started = time.perf_counter()
    sampler = run.save_weights_and_get_sampling_client().result(60)
    asyncio.run(_sample(sampler, first, 1, 1))
    seconds = time.perf_counter() - started
    return seconds - timed(lambda: asyncio.run(_sample(sampler, second, 1, 1)))


def _section(seconds: dict[str, list[float]], late: float, rounds: int) -> Section:
    rates = {name: [tokens / each for each in seconds[name]] for name, tokens in NUM_TOKENS.items()}
    table = [
        {"what": name, "tokens/s": statistics.median(rates[name]), "ms": 1000 * statistics.median(seconds[name])}
        for name in NUM_TOKENS
    ]

    def ratio(one: str, other: str) -> float:
        return median_ratio(rates[one], rates[other])

    lines = [
        Line("8x4 samples of 64, times generate's tokens/s", ratio(BATCH, BATCH_LOCAL), "at least", 2.0),
        Line("64 clients joining and leaving, times the full batch's tokens/s", ratio(RAGGED, BATCH), "at least", 0.8),
        Line("one request of 16 tokens, times generate's time", ratio(ONE_LOCAL, ONE), "at most", 1.1),
        Line("8 adapters in one batch, times one adapter's tokens/s", ratio(MIXED, BATCH), "at least", 0.7),
        Line("first token of weights just trained, ms above another token", late, "at most", 30),
    ]
    notes = [
        f"Medians of {rounds} rounds; prompts of {LENGTH} tokens, temperature 1, log-probabilities on. Ragged: prompts",
        "and samples of 16 to 112 tokens, arriving within 0.3 s. A client of 4 samples requests as many tokens for a",
        "prompt as the batch does; one of 1 sample has four times the prompt to prefill for each token.",
    ]
    return Section("Sampling against transformers' generate", table, lines, notes)


# vLLM

OURS, THEIRS, ON_ONE_THREAD = "native, SDK over HTTP", "vllm.LLM in process", "vllm.LLM in process, one thread"
"""vLLM's threads spin while they wait for each other, so one of them can be faster than all on a busy machine."""


def against_vllm(setup: Setup) -> Section:
    model = tiny_model("qwen3", setup.scratch / "vllm-model", **(SHAPE | {"head_dim": 32}))
    unseen = Prompts()
    with ExitStack() as stack:
        server = stack.enter_context(replace(setup, model=model).server("vllm-server"))
        service = stack.enter_context(connect(server.url))
        path = new_run(service).save_weights_for_sampler("bench").result(60).path
        sampler = service.create_sampling_client(path).result(60)
        [config] = (server.state_dir / "checkpoints").rglob("adapter_config.json")
        about = {"model": str(model), "adapter": str(config.parent), "rank": RANK}
        theirs, on_one_thread = (stack.enter_context(_vllm(about, *threads)) for threads in ((), ("1",)))
        sides = {
            OURS: lambda: sample_batch([sampler] * PROMPTS, unseen),
            THEIRS: lambda: _ask(theirs, unseen),
            ON_ONE_THREAD: lambda: _ask(on_one_thread, unseen),
        }
        seconds = in_turn(sides, setup.rounds, warm_ups=1)
    medians = {name: statistics.median(of_side) for name, of_side in seconds.items()}
    table = [{"what": name, "tokens/s": IN_BATCH / each, "ms": 1000 * each} for name, each in medians.items()]
    ratio = median_ratio(map(min, seconds[THEIRS], seconds[ON_ONE_THREAD]), seconds[OURS])
    lines = [Line("8x4 samples of 64, times the faster vLLM's tokens/s", ratio, "at least", 1.5)]
    notes = [
        f"Medians of {setup.rounds} rounds; new prompts of {LENGTH} tokens each round, temperature 1,",
        f"log-probabilities on, a rank-{RANK} adapter, float32; the sides take turns.",
    ]
    return Section("Sampling against vLLM on the CPU", table, lines, notes)


@contextmanager
def _vllm(about: object, *threads: str) -> Iterator[Child]:
    program = Path(__file__).with_name("processes") / "local_vllm.py"
    with running([vllm_python(), str(program), *threads]) as vllm:
        vllm.ask(about)
        yield vllm


def vllm_python() -> str:
    python = os.environ.get("TRAINHOUSE_VLLM_PYTHON")
    if not python:
        raise SystemExit("TRAINHOUSE_VLLM_PYTHON names no Python that has vLLM: run make bench-vllm")
    return python


def _ask(vllm: Child, unseen: Prompts) -> float:
    return vllm.ask({"prompts": unseen.new(PROMPTS), "num_samples": SAMPLES, "max_tokens": LENGTH})

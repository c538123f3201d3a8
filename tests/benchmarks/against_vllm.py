"""`make bench-vllm`: our native engine through the official SDK over HTTP against `vllm.LLM` in a process of its own.

Needs TRAINHOUSE_VLLM_PYTHON, a Python that has vLLM. The workload is that of the section "sampling", with heads of 32:
vLLM's attention on CPUs knows none of 16.
"""

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import tinker

from ..live import live_server
from ..tiny import tiny_model
from .child import Child, running
from .report import Line, Section
from .sampling import LENGTH, PROMPTS, SAMPLES, batch_seconds
from .workload import MODEL, RANK, SHAPE, Rows, rows

OURS, THEIRS, ON_ONE_THREAD = "native, SDK over HTTP", "vllm.LLM in process", "vllm.LLM in process, one thread"
"""vLLM's threads spin while they wait for each other: beside other work one of them may be faster than all."""


def against_vllm(_: Path, scratch: Path, pool: str, rounds: int) -> Section:
    threads = os.cpu_count() or 1
    model = tiny_model("qwen3", scratch / "vllm-model", **(SHAPE | {"head_dim": 32}))
    with ExitStack() as stack:
        state_dir = scratch / "vllm-server"
        server = stack.enter_context(live_server({MODEL: model}, state_dir, pool=pool, threads=threads))
        service = stack.enter_context(tinker.ServiceClient(base_url=server.url, api_key="tml-bench"))
        trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=0, train_unembed=False).result(60)
        sampler = service.create_sampling_client(trainer.save_weights_for_sampler("bench").result(60).path).result(60)
        [config] = (state_dir / "checkpoints").rglob("adapter_config.json")
        setup = {"model": str(model), "adapter": str(config.parent), "rank": RANK}
        theirs = stack.enter_context(_vllm(setup))
        on_one_thread = stack.enter_context(_vllm(setup, "1"))
        sides: dict[str, Callable[[Rows], float]] = {
            OURS: lambda prompts: batch_seconds([sampler] * PROMPTS, prompts),
            THEIRS: lambda prompts: _ask(theirs, prompts),
            ON_ONE_THREAD: lambda prompts: _ask(on_one_thread, prompts),
        }
        measured = [{name: side(_prompts(number)) for name, side in sides.items()} for number in range(rounds + 1)]
    return _section(measured[1:], rounds)  # the first is for warming up


@contextmanager
def _vllm(setup: object, *arguments: str) -> Iterator[Child]:
    python = os.environ.get("TRAINHOUSE_VLLM_PYTHON")
    if not python:
        raise SystemExit("TRAINHOUSE_VLLM_PYTHON names no Python that has vLLM: make bench-vllm")
    with running([python, str(Path(__file__).with_name("local_vllm.py")), *arguments]) as child:
        child.ask(setup)
        yield child


def _prompts(number: int) -> Rows:
    """New ones every round, so that nobody has seen them before."""
    return [row[:LENGTH] for row in rows([LENGTH] * PROMPTS, seed=1000 + number)]


def _ask(theirs: Child, prompts: Rows) -> float:
    return theirs.ask({"prompts": prompts, "num_samples": SAMPLES, "max_tokens": LENGTH})


def _section(seconds: list[dict[str, float]], rounds: int) -> Section:
    num_tokens = PROMPTS * SAMPLES * LENGTH
    medians = {name: statistics.median(each[name] for each in seconds) for name in seconds[0]}
    table = [{"what": name, "tokens/s": num_tokens / each, "ms": 1000 * each} for name, each in medians.items()]
    ratio = statistics.median(min(each[THEIRS], each[ON_ONE_THREAD]) / each[OURS] for each in seconds)
    lines = [Line("8x4 samples of 64, times the faster vLLM's tokens/s", ratio, "at least", 1.5)]
    notes = [
        f"Medians of {rounds} rounds; new prompts of {LENGTH} tokens each round, temperature 1, log-probabilities on,",
        f"a rank-{RANK} adapter, float32; the sides take turns.",
    ]
    return Section("Sampling against vLLM on the CPU", table, lines, notes)

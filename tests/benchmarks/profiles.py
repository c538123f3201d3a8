"""Programs that print figures for which docs/performance.md requires no bound.

python -m trainhouse.tests.benchmarks.profiles PROGRAM [OPTIONS]

Most measure CPU time, which other processes disturb less than elapsed time.
"""

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path

import psutil
import torch
from torch import Tensor
from trainhouse import SamplingClient, SamplingParams, ServiceClient

from ...schemas.models import FullConfig, LoraConfig, TrainingConfig
from ...workers.lora import LoraLayers, Segment
from ...workers.models.model import BaseModel
from ...workers.ops.attention import Packing, pack_lengths
from ...workers.ops.kernels import PrefixGroups
from ...workers.ops.kv_cache import CachedRow, DecodeStep, SlotTensors
from ...workers.protocol.calls import OperationPart, OptimizerStep, RunSpec
from ...workers.protocol.parallel_spec import SINGLE
from ...workers.protocol.worker_config import ServedModel, WorkerConfig
from ...workers.registry.model_registry import KINDS, ModelRegistry
from ...workers.resources.allocator import tune_allocator
from ...workers.state.residency import Residency
from ...workers.worker.worker import Worker
from ..acceptance.crashing import Crashing, until, worker_pids
from ..acceptance.training_script import MODEL as TRAINED_MODEL
from ..tiny import tiny_model
from ..workers.parallel.training import layout
from .harness import (
    LORA,
    MODEL,
    RANK,
    SHAPE,
    VOCAB,
    Rows,
    batches,
    child,
    in_turn,
    median_ratio,
    num_tokens,
    request,
)
from .parallel import ADAM, run_step, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    programs = parser.add_subparsers(required=True)

    def add(program: Callable[[argparse.Namespace, Path], None], **integers: int) -> argparse.ArgumentParser:
        added = programs.add_parser(
            program.__name__.replace("_", "-"), help=program.__doc__, description=program.__doc__
        )
        added.set_defaults(program=program)
        for name, default in integers.items():
            added.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
        return added

    profiled = add(step_profile, rounds=9, threads=1)
    profiled.add_argument("--training", choices=["lora", "full"], default="lora", help="full: of all weights")
    profiled.add_argument("--table", action="store_true", help="torch's profile of our step by operator")
    add(lora_kernels, rounds=15, threads=1)
    add(adapter_swaps, rounds=9)
    add(after_death, requests=8, samples=48, most_megabytes=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        options.program(options, Path(scratch))


def step_profile(options: argparse.Namespace, scratch: Path) -> None:
    """Compares the worker's own training step with the hand-written loop's, in CPU milliseconds, without a server."""
    model = tiny_model("qwen3", scratch / "model", **SHAPE)
    training = FullConfig() if options.training == "full" else LORA
    worker_options = {"threads": options.threads, "device": "cpu"}
    with layout(model, SINGLE, scratch, **worker_options) as worker, child("local", "train") as local:
        worker.call("create_run", RunSpec("run", training))
        rank = None if options.training == "full" else RANK
        local.ask({"model": str(model), "threads": options.threads, "rank": rank, "batches": batches()})
        for name, rows in batches().items():
            sides = {
                "worker": lambda rows=rows: 1000 * spent(worker, lambda: run_step(worker, rows))[1].cpu,
                "local": lambda name=name: 1000 * local.ask({"batch": name, "steps": 1})[1],
            }
            found = in_turn(sides, options.rounds, warm_ups=1)
            for what, of in (("median", statistics.median), ("least", min)):
                ours, theirs = (of(milliseconds) for milliseconds in found.values())
                print(
                    f"{name:<14}{num_tokens(rows):>5} tokens  {what:<7} worker {ours:7.1f} ms  "
                    f"local loop {theirs:7.1f} ms  {theirs / ours:5.2f}x",
                    flush=True,
                )
            if options.table:
                print(_operator_table(WorkerConfig(ServedModel(MODEL, str(model)), **worker_options), training, rows))


def _operator_table(config: WorkerConfig, training: TrainingConfig, rows: Rows) -> str:
    worker = Worker(config)
    worker.create_run(RunSpec("run", training))

    def step() -> None:
        worker.run_pass((OperationPart(0, request("run", rows)),))
        worker.apply_steps((OptimizerStep("run", ADAM),))

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as recorded:
        step()
    averages = recorded.key_averages(group_by_input_shape=True)
    return averages.table(
        sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=40, max_shapes_column_width=60
    )


# Kernels of LoRA

MIXED = [4, 8, 16, 32, 4, 8, 16, 32]
CACHED = 40
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}

Cases = Mapping[str, Callable[[], None]]
"""Steps to time. The others are compared with the first."""


def lora_kernels(options: argparse.Namespace, scratch: Path) -> None:
    """Compares many adapters in one packed row with one adapter over all of it, in the model alone.

    Measures training rows (forward and backward of the trunk) and a decode step of 32 sequences, in CPU milliseconds;
    with several threads in wall-clock time, which means something on a quiet machine only. Ratios of a model with
    experts are to adapters of attention alone.
    """
    tune_allocator()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    dense = Trunk(tiny_model("qwen3", scratch / "model", **SHAPE))
    sparse = Trunk(tiny_model("qwen3_moe", scratch / "sparse", **(SHAPE | EXPERTS)))
    for title, cases in (*_training_cases(dense), *_decoding_cases(dense), *_sparse_cases(sparse)):
        print(title)
        sides = {name: lambda step=step: _milliseconds(step, clock) for name, step in cases.items()}
        found = in_turn(sides, options.rounds, warm_ups=1)
        first = next(iter(found.values()))
        for name, times in found.items():
            ratio = median_ratio(times, first)
            print(f"  {name:<34}{statistics.median(times):8.1f} ms  {ratio:5.2f} (best {min(times):.1f})", flush=True)


def _milliseconds(step: Callable[[], None], clock: Callable[[], float]) -> float:
    started = clock()
    step()
    return 1000 * (clock() - started)


class Trunk:
    """A base model with adapters, and the steps to time."""

    def __init__(self, directory: Path) -> None:
        self._base = BaseModel(WorkerConfig(ServedModel(MODEL, str(directory)), device="cpu"))
        self._lora = LoraLayers(self._base, max_rank=64)

    def train(self, lengths: Sequence[int], ranks: Sequence[int], mlp: bool = True) -> Callable[[], None]:
        """Runs forward and backward of sequences, divided among adapters of these ranks."""
        segments, num_tokens = self._segments(lengths, ranks, mlp), sum(lengths)
        tokens, packing = _tokens(num_tokens), Packing(pack_lengths(list(lengths)))
        positions = torch.cat([torch.arange(length) for length in lengths])
        gradient = torch.randn(num_tokens, SHAPE["hidden_size"])

        def step() -> None:
            with self._lora.applied(segments):
                self._base.hidden_states(tokens, positions, packing).backward(gradient)

        return step

    @torch.no_grad()
    def decode(self, rows: Sequence[int], ranks: Sequence[int], mlp: bool = True) -> Callable[[], None]:
        """Runs one token of sequences that have CACHED. rows: of each adapter."""
        num_rows = sum(rows)
        plan = self._lora.plan(self._segments(rows, ranks, mlp) if ranks else [])
        tensors = SlotTensors(CACHED + 1)
        tensors.resize(num_rows)
        tokens, lengths, slots = _tokens(num_rows), torch.full((num_rows,), CACHED), torch.arange(num_rows)
        alone = PrefixGroups(slots, torch.arange(num_rows + 1), torch.zeros(num_rows, dtype=torch.int64))

        @torch.no_grad()
        def step() -> None:
            one_each = DecodeStep(tensors, slice(0, num_rows), slots, True, lengths, num_rows, CACHED + 1, alone)
            packing = CachedRow([one_each], (), None, num_rows, ())
            with self._lora.applied(plan):
                self._base.hidden_states(tokens, lengths, packing)

        return step

    def _segments(self, lengths: Sequence[int], ranks: Sequence[int], mlp: bool) -> list[Segment]:
        each = len(lengths) // len(ranks)
        sizes = [sum(lengths[i : i + each]) for i in range(0, len(lengths), each)]
        loras = [LoraConfig(rank=rank, train_unembed=False, train_mlp=mlp) for rank in ranks]
        adapters = [self._lora.build(lora) for lora in loras]
        for adapter in adapters:
            adapter.weights.normal_(0, 0.02)
        return [
            Segment(stop - size, stop, adapter)
            for adapter, size, stop in zip(adapters, sizes, accumulate(sizes), strict=True)
        ]


def _training_cases(trunk: Trunk) -> Iterator[tuple[str, Cases]]:
    for name, lengths, one, several, many in (
        ("16x128", [128] * 16, [16], "8 of ranks 4 to 32", MIXED),
        ("16 of about 128", _around(128, 16), [16], "8 of ranks 4 to 32", MIXED),
        ("16x64", [64] * 16, [8], "16 of rank 8", [8] * 16),
        ("16 of about 64", _around(64, 16), [8], "16 of rank 8", [8] * 16),
    ):
        cases = {"one adapter": trunk.train(lengths, one), several: trunk.train(lengths, many)}
        yield f"train {name}, {sum(lengths)} tokens", cases


def _decoding_cases(trunk: Trunk) -> Iterator[tuple[str, Cases]]:
    uneven = [2, 3, 5, 4, 6, 4, 5, 3]
    yield (
        "decode 32 sequences",
        {
            "one adapter": trunk.decode([32], [8]),
            "none": trunk.decode([32], []),
            "8 of rank 8, 4 rows each": trunk.decode([4] * 8, [8] * 8),
            "8 of rank 8, 2 to 6 rows": trunk.decode(uneven, [8] * 8),
            "8 of ranks 4 to 32, 2 to 6 rows": trunk.decode(uneven, MIXED),
        },
    )


def _sparse_cases(trunk: Trunk) -> Iterator[tuple[str, Cases]]:
    experts = f"{EXPERTS['num_experts']} experts, {EXPERTS['num_experts_per_tok']} of each token"
    for title, run, one, each in (
        (f"train 16x128 of {experts}", trunk.train, [128] * 16, [128] * 16),
        ("decode 32 sequences of the same", trunk.decode, [32], [4] * 8),
    ):
        rows_each = ", 4 rows each" if each == [4] * 8 else ""
        yield (
            title,
            {
                "one adapter of attention": run(one, [8], mlp=False),
                "one adapter, experts too": run(one, [8]),
                f"8 of rank 8{rows_each}": run(each, [8] * 8),
                f"8 of ranks 4 to 32{rows_each}": run(each, MIXED),
            },
        )


def _around(mean: int, count: int) -> list[int]:
    draw = partial(random.Random(0).randint, mean * 3 // 5, mean * 7 // 5)
    return [draw() for _ in range(count)]


def _tokens(count: int) -> Tensor:
    return torch.randint(3, VOCAB, (count,))


# Swaps

NUM_ADAPTERS, RANKS = 4, (8, 64, 256)
HOST_BYTES = {"host": None, "disk": 0}


def adapter_swaps(options: argparse.Namespace, scratch: Path) -> None:
    """Measures the cost of reloading an adapter, in milliseconds of this thread's CPU and of the clock.

    One adapter fits the device, and in each round several displace each other. A slow disk lengthens the time.
    """
    torch.set_num_threads(1)
    directory = tiny_model("qwen3", scratch / "model", **SHAPE)
    for rank in RANKS:
        for place, host_bytes in HOST_BYTES.items():
            adapters = _trained_adapters(directory, rank, host_bytes)
            for changed in (False, True):
                rounds = in_turn({"swap": lambda: _swap(adapters, changed)}, options.rounds, warm_ups=1)["swap"]  # noqa: B023
                cpu, clock = (statistics.median(values) for values in zip(*rounds, strict=True))
                with adapters.resident(["0"]) as (adapter,):
                    megabytes = sum(vector.nbytes for vector in adapter.live_vectors().values()) / 1e6
                what = f"rank {rank}, {megabytes:.1f} MB, to and from {place}, {'' if changed else 'un'}changed"
                print(f"{what:48} {cpu:8.3f} ms of CPU {clock:8.3f} ms of time")


def _trained_adapters(directory: Path, rank: int, host_bytes: int | None) -> ModelRegistry:
    """Returns adapters with moments, as after an optimizer step."""
    base = BaseModel(WorkerConfig(ServedModel("tiny", str(directory))))
    adapters = ModelRegistry(base, LoraLayers(base, rank), Residency(base.device, dict.fromkeys(KINDS, 1), host_bytes))
    for i in range(NUM_ADAPTERS):
        adapter = adapters.put(str(i), adapters.build(LoraConfig(rank=rank, train_unembed=False)))
        adapter.initialize()
        for vector in (adapter.exp_avg, adapter.exp_avg_sq):
            vector.normal_()
        adapter.num_steps = 1
    return adapters


def _swap(adapters: ModelRegistry, changed: bool) -> tuple[float, float]:
    """Returns the milliseconds of CPU and of the clock until an adapter was back, the mean of all."""
    cpu, clock = time.thread_time(), time.perf_counter()
    for adapter_id in adapters:
        with adapters.resident([adapter_id]) as (adapter,):
            if changed:
                adapter.weights[:1].add_(1.0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.thread_time() - cpu, time.perf_counter() - clock
    return 1000 * seconds[0] / NUM_ADAPTERS, 1000 * seconds[1] / NUM_ADAPTERS


# After a death

PROMPT, LONG_TOKENS, SHORT_TOKENS, NUM_SHORT = [5] * 16, 1000, 3, 20
GIVE_UP_SECONDS = 180.0


def after_death(options: argparse.Namespace, scratch: Path) -> None:
    """Measures when samples of three tokens and long ones are answered after the worker was killed amid the long ones.

    It is killed once; or, with --most-megabytes, each time that it has grown by this much since before the requests, as
    if the kernel killed it for lack of memory.
    """
    with Crashing(tiny_model("qwen3", scratch), scratch / "server").running() as crashing:
        figures = _measure_death(crashing, options.requests, options.samples, options.most_megabytes)
        print(json.dumps(figures, indent=1))
        print(*(line for line in crashing.log.splitlines() if "the worker died" in line), sep="\n")


class Killer(threading.Thread):
    """Kills the worker whenever it has more than `most_bytes`, until `stops` is set."""

    def __init__(self, server_pid: int, most_bytes: int) -> None:
        super().__init__(daemon=True)
        self.num_kills = 0
        self.stops = threading.Event()
        self._server_pid, self._most_bytes = server_pid, most_bytes

    def run(self) -> None:
        while not self.stops.wait(0.01):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                for pid in worker_pids(self._server_pid):
                    if psutil.Process(pid).memory_info().rss > self._most_bytes:
                        os.kill(pid, signal.SIGKILL)
                        self.num_kills += 1


def _measure_death(crashing: Crashing, requests: int, samples: int, most_megabytes: int) -> dict[str, object]:
    with ServiceClient(crashing.url, "tml-long") as long, ServiceClient(crashing.url, "tml-short") as short:
        shorts, longs = (client.create_sampling_client(base_model=TRAINED_MODEL) for client in (short, long))
        _short_sample_seconds(shorts)
        [pid] = worker_pids(crashing.pid)
        killer = Killer(crashing.pid, psutil.Process(pid).memory_info().rss + (most_megabytes << 20))
        params = [SamplingParams(max_tokens=LONG_TOKENS, seed=seed) for seed in range(requests)]
        futures = [longs.sample(PROMPT, samples, each) for each in params]
        started = time.monotonic()
        if most_megabytes:
            killer.start()
            until(lambda: killer.num_kills, GIVE_UP_SECONDS)
        else:
            time.sleep(3)
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        seconds = [_short_sample_seconds(shorts) for _ in range(NUM_SHORT)]
        all_short = time.monotonic() - killed
        failures = []
        for each in futures:
            try:
                each.result(GIVE_UP_SECONDS)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}"[:160])
        ended = time.monotonic()
        killer.stops.set()
    return {
        "killed after, s": round(killed - started, 1),
        "first short sample after the death, s": round(seconds[0], 2),
        "the next ones, median and worst, s": [round(statistics.median(seconds[1:]), 3), round(max(seconds[1:]), 3)],
        "all short samples, s": round(all_short, 1),
        "the last long sample after the death, s": round(ended - killed, 1),
        "kills": killer.num_kills if most_megabytes else 1,
        "long samples that failed": failures,
    }


def _short_sample_seconds(client: SamplingClient) -> float:
    started = time.monotonic()
    client.sample(PROMPT, 1, SamplingParams(max_tokens=SHORT_TOKENS)).result(GIVE_UP_SECONDS)
    return time.monotonic() - started


if __name__ == "__main__":
    main()

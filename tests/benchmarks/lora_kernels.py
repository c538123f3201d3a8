"""What many adapters in one packed row cost against one adapter over all of it, in the model alone.

`python -m trainhouse.tests.benchmarks.lora_kernels` prints, for training rows (forward and backward of the trunk) and
for a decode step of 32 sequences, the CPU milliseconds on one thread and their ratio to one adapter: medians of
alternating rounds. Of a model with experts, the ratio is to adapters of attention alone. With `--threads 2` it prints
wall-clock time, which means something on a quiet machine only.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ...schemas.models import LoraConfig
from ...workers.lora import Adapters, Segment
from ...workers.models.model import BaseModel
from ...workers.ops.allocator import tune_allocator
from ...workers.ops.attention import Packing, pack_lengths
from ...workers.ops.kernels import Groups
from ...workers.ops.kv_cache import CachedRow, DecodeStep, Shelf
from ...workers.protocol.config import ServedModel, WorkerConfig
from ..tiny import tiny_model
from .workload import MODEL, SHAPE, VOCAB

MIXED = [4, 8, 16, 32, 4, 8, 16, 32]
CACHED = 40
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(tiny_model("qwen3", Path(scratch) / "model", **SHAPE))
        for title, cases in (*training(bench), decoding(bench)):
            print(title)
            report(cases, options.rounds, clock)
        bench = Bench(tiny_model("qwen3_moe", Path(scratch) / "sparse", **(SHAPE | EXPERTS)))
        for title, cases in sparse(bench):
            print(title)
            report(cases, options.rounds, clock)


class Bench:
    """A base model, and the steps to be timed."""

    def __init__(self, directory: Path) -> None:
        self._base = BaseModel(WorkerConfig(ServedModel(MODEL, str(directory)), device="cpu"))
        self._adapters = Adapters(self._base, max_rank=64)

    def train(self, lengths: Sequence[int], ranks: Sequence[int], mlp: bool = True) -> Callable[[], None]:
        """Forward and backward of sequences, divided among adapters of these ranks."""
        segments, num_tokens = self._segments(lengths, ranks, mlp), sum(lengths)
        tokens, packing = _tokens(num_tokens), Packing(pack_lengths(list(lengths)))
        positions = torch.cat([torch.arange(length) for length in lengths])
        gradient = torch.randn(num_tokens, SHAPE["hidden_size"])

        def step() -> None:
            with self._adapters.applied(segments):
                self._base.hidden_states(tokens, positions, packing).backward(gradient)

        return step

    @torch.no_grad()
    def decode(self, rows: Sequence[int], ranks: Sequence[int], mlp: bool = True) -> Callable[[], None]:
        """One token of sequences that have CACHED: rows of each adapter."""
        num_rows = sum(rows)
        plan = self._adapters.plan(self._segments(rows, ranks, mlp) if ranks else [])
        shelf = Shelf(SHAPE["num_hidden_layers"], CACHED + 1)
        shelf.resize(num_rows)
        tokens, lengths, slots = _tokens(num_rows), torch.full((num_rows,), CACHED), torch.arange(num_rows)
        alone = Groups(slots, torch.arange(num_rows + 1), torch.zeros(num_rows, dtype=torch.int64))

        @torch.no_grad()
        def step() -> None:
            one_each = DecodeStep(shelf, slice(0, num_rows), slots, True, lengths, num_rows, CACHED + 1, alone)
            packing = CachedRow([one_each], (), None, num_rows, ())
            with self._adapters.applied(plan):
                self._base.hidden_states(tokens, lengths, packing)

        return step

    def _segments(self, lengths: Sequence[int], ranks: Sequence[int], mlp: bool) -> list[Segment]:
        each = len(lengths) // len(ranks)
        sizes = [sum(lengths[i : i + each]) for i in range(0, len(lengths), each)]
        loras = [LoraConfig(rank=rank, train_unembed=False, train_mlp=mlp) for rank in ranks]
        adapters = [self._adapters.build(lora) for lora in loras]
        for adapter in adapters:
            adapter.weights.normal_(0, 0.02)
        return [
            Segment(stop - size, stop, adapter)
            for adapter, size, stop in zip(adapters, sizes, accumulate(sizes), strict=True)
        ]


def training(bench: Bench) -> list[tuple[str, dict[str, Callable[[], None]]]]:
    even_long, even_short = [128] * 16, [64] * 16
    uneven_long, uneven_short = around(128, 16), around(64, 16)
    return [
        (
            f"train {name}, {sum(lengths)} tokens",
            {"one adapter": bench.train(lengths, one), several: bench.train(lengths, many)},
        )
        for name, lengths, one, several, many in (
            ("16x128", even_long, [16], "8 of ranks 4 to 32", MIXED),
            ("16 of about 128", uneven_long, [16], "8 of ranks 4 to 32", MIXED),
            ("16x64", even_short, [8], "16 of rank 8", [8] * 16),
            ("16 of about 64", uneven_short, [8], "16 of rank 8", [8] * 16),
        )
    ]


def decoding(bench: Bench) -> tuple[str, dict[str, Callable[[], None]]]:
    uneven = [2, 3, 5, 4, 6, 4, 5, 3]
    return "decode 32 sequences", {
        "one adapter": bench.decode([32], [8]),
        "none": bench.decode([32], []),
        "8 of rank 8, 4 rows each": bench.decode([4] * 8, [8] * 8),
        "8 of rank 8, 2 to 6 rows": bench.decode(uneven, [8] * 8),
        "8 of ranks 4 to 32, 2 to 6 rows": bench.decode(uneven, MIXED),
    }


def sparse(bench: Bench) -> list[tuple[str, dict[str, Callable[[], None]]]]:
    """With and without adapters of the experts."""
    lengths = [128] * 16
    return [
        (
            f"train 16x128 of {EXPERTS['num_experts']} experts, {EXPERTS['num_experts_per_tok']} of each token",
            {
                "one adapter of attention": bench.train(lengths, [8], mlp=False),
                "one adapter, experts too": bench.train(lengths, [8]),
                "8 of rank 8": bench.train(lengths, [8] * 8),
                "8 of ranks 4 to 32": bench.train(lengths, MIXED),
            },
        ),
        (
            "decode 32 sequences of the same",
            {
                "one adapter of attention": bench.decode([32], [8], mlp=False),
                "one adapter, experts too": bench.decode([32], [8]),
                "8 of rank 8, 4 rows each": bench.decode([4] * 8, [8] * 8),
                "8 of ranks 4 to 32, 4 rows each": bench.decode([4] * 8, MIXED),
            },
        ),
    ]


def around(mean: int, count: int) -> list[int]:
    draw = partial(random.Random(0).randint, mean * 3 // 5, mean * 7 // 5)
    return [draw() for _ in range(count)]


def report(cases: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float]) -> None:
    """The first case is what the others are compared with."""
    for step in cases.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, step in cases.items():
            started = clock()
            step()
            times[name].append((clock() - started) * 1000)
    first = next(iter(times.values()))
    for name, of_case in times.items():
        ratio = statistics.median(a / b for a, b in zip(of_case, first, strict=True))
        print(f"  {name:<34}{statistics.median(of_case):8.1f} ms  {ratio:5.2f} (best {min(of_case):.1f})", flush=True)


def _tokens(count: int) -> Tensor:
    return torch.randint(3, VOCAB, (count,))


if __name__ == "__main__":
    main()

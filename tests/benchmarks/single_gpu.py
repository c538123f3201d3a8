"""Training on one GPU: tokens/s, the share of what a product of matrices reaches there, and memory against plan's."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...workers.config import ServedModel
from ...workers.parallel.estimate import estimate
from ...workers.parallel.load import Load
from ...workers.parallel.parameters import adapter_size, num_parameters
from ...workers.parallel.shape import ModelShape, read_model
from ...workers.parallel.spec import SINGLE
from ...workers.verbs import RunSpec
from ..tiny import tiny_model
from ..workers.parallel.training import layout
from .layout_steps import LORA, run_step
from .metered_worker import MeteredWorker
from .report import Line, Section
from .workload import RANK, Rows, num_tokens, rows

GPU_WORKER = f"{__name__}:GpuWorker"
WARM_UPS = 3

# 0.9 billion parameters.
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "initializer_range": 0.02,
}
LENGTHS = (1024,) * 16
PRODUCT_SIZE = 8192
LOAD = Load(1024, "bfloat16", micro_batch_tokens=8192, lora_rank=RANK, adapter_slots=1, samples=False)


class GpuWorker(MeteredWorker):
    def product_rate(self, size: int) -> float:
        """Operations a second, a multiplication and an addition each, of a square product in the base's dtype."""
        left, right = (torch.randn(size, size, device=self._base.device, dtype=self._base.dtype) for _ in range(2))
        return 2 * size**3 / min(self._seconds_of_product(left, right) for _ in range(10))

    def _seconds_of_product(self, left: Tensor, right: Tensor) -> float:
        started = time.perf_counter()
        (left @ right)[0, 0].item()  # waits for the device
        return time.perf_counter() - started


@dataclass(frozen=True)
class Outcome:
    """seconds: of steps. product_rate: see GpuWorker. num_bytes: of the device, at most in a pass, and as planned."""

    seconds: list[float]
    product_rate: float
    num_bytes: int
    planned: int


def single_gpu(_: Path, scratch: Path, pool: str, rounds: int) -> Section:
    if not torch.cuda.is_available():
        return Section("One GPU", (), (), ["not run: no CUDA device"])
    model = tiny_model("qwen3", scratch / "gpu", **SIZES)
    shape = read_model(ServedModel("measured", str(model)))
    assert isinstance(shape, ModelShape)
    batch = rows(list(LENGTHS))
    outcome = measured(model, shape, batch, LOAD, scratch, "cuda", rounds, PRODUCT_SIZE)
    return _section(outcome, shape, batch, torch.cuda.get_device_name())


def measured(
    model: Path, shape: ModelShape, batch: Rows, load: Load, scratch: Path, device: str, rounds: int, product_size: int
) -> Outcome:
    knobs = {"micro_batch_tokens": load.micro_batch_tokens, "adapter_slots": load.adapter_slots, "dtype": load.dtype}
    with layout(model, SINGLE, scratch, GPU_WORKER, device=device, hang_seconds=600.0, **knobs) as where:
        where.call("create_run", RunSpec("run", LORA))
        for _ in range(WARM_UPS):
            run_step(where, batch)
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            run_step(where, batch)
            seconds.append(time.perf_counter() - started)
        taken, before = where.call("metered_pass").taken, where.call("loading").taken.before
        rate = where.call("product_rate", product_size)
    return Outcome(seconds, rate, taken.most - before, estimate(shape, SINGLE, load).total)


def _section(outcome: Outcome, shape: ModelShape, batch: Rows, name: str) -> Section:
    seconds = statistics.median(outcome.seconds)
    row = {
        "device": name,
        "tokens/s": num_tokens(batch) / seconds,
        "ms a step": 1000 * seconds,
        "of a product's rate, %": 100 * num_operations(shape, batch) / seconds / outcome.product_rate,
        "product, TFLOP/s": outcome.product_rate / 1e12,
        "memory, GB": outcome.num_bytes / 1e9,
        "plan's, GB": outcome.planned / 1e9,
    }
    distance = abs(outcome.num_bytes / outcome.planned - 1)
    lines = [Line("memory of training, distance from plan's as a share of it", distance, "at most", 0.1)]
    notes = [
        f"A Qwen3 of {num_parameters(shape) / 1e9:.2f} billion parameters in {LOAD.dtype}, rank {RANK}; steps of",
        f"{len(batch)} sequences, {num_tokens(batch)} tokens, in micro-batches of {LOAD.micro_batch_tokens}; medians",
        f"of {len(outcome.seconds)} rounds. Of a product's rate: the operations that a step needs (num_operations), as",
        f"if all ran like a product of square matrices of {PRODUCT_SIZE} rows. Memory: of tensors, at most in a pass.",
    ]
    return Section("One GPU", [row], lines, notes)


def num_operations(shape: ModelShape, batch: Rows) -> float:
    """A step needs, a multiplication and an addition each: two products with each frozen weight but the embedding's
    (forward, and the gradient of its input), three with those of adapters, and in causal attention half of all scores,
    forward and twice that backward."""
    tokens = num_tokens(batch)
    frozen = num_parameters(shape) - shape.vocab * shape.hidden
    pairs = sum((len(row) - 1) ** 2 / 2 for row in batch)
    attention = 3 * 4 * pairs * shape.heads * shape.head_dim * shape.num_layers
    return tokens * (4 * frozen + 6 * adapter_size(shape, SINGLE, RANK)) + attention

"""What it costs to bring an adapter back: `python -m trainhouse.tests.benchmarks.adapter_swaps`.

One adapter fits the device, and every line is a round of several that push each other out, in milliseconds a swap
(median of the rounds): of this thread's CPU, and of the clock, which a slow disk lengthens.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ...schemas.models import LoraConfig
from ...workers.lora import Adapters
from ...workers.models.model import BaseModel
from ...workers.protocol.config import ServedModel, WorkerConfig
from ...workers.state.residency import Residency
from ..tiny import tiny_model
from .workload import SHAPE

NUM_ADAPTERS, NUM_ROUNDS, RANKS = 4, 9, (8, 64, 256)
HOST_BYTES = {"host": None, "disk": 0}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        directory = tiny_model("qwen3", Path(scratch) / "model", **SHAPE)
        for rank in RANKS:
            for place, host_bytes in HOST_BYTES.items():
                adapters = trained_adapters(directory, rank, host_bytes)
                for changed in (False, True):
                    cpu, clock = (statistics.median(values) for values in zip(*swaps(adapters, changed), strict=True))
                    with adapters.resident(["0"]) as (adapter,):
                        megabytes = sum(vector.nbytes for vector in adapter.live().values()) / 1e6
                    what = f"rank {rank}, {megabytes:.1f} MB, to and from {place}, {'' if changed else 'un'}changed"
                    print(f"{what:48} {cpu:8.3f} ms of CPU {clock:8.3f} ms of time")


def trained_adapters(directory: Path, rank: int, host_bytes: int | None) -> Adapters:
    """With the optimizer's moments, as after a step."""
    base = BaseModel(WorkerConfig(ServedModel("tiny", str(directory))))
    adapters = Adapters(base, rank, Residency(base.device, 1, host_bytes))
    for i in range(NUM_ADAPTERS):
        adapter = adapters.put(str(i), adapters.build(LoraConfig(rank=rank, train_unembed=False)))
        adapter.initialize()
        for vector in (adapter.exp_avg, adapter.exp_avg_sq):
            vector.normal_()
    return adapters


def swaps(adapters: Adapters, changed: bool) -> Iterator[tuple[float, float]]:
    """Milliseconds of CPU and of the clock that an adapter took to come back, a round each after the first."""
    for i in range(NUM_ROUNDS + 1):
        cpu, clock = time.thread_time(), time.perf_counter()
        for adapter_id in adapters:
            with adapters.resident([adapter_id]) as (adapter,):
                if changed:
                    adapter.weights[:1].add_(1.0)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i:
            yield per_swap(time.thread_time() - cpu), per_swap(time.perf_counter() - clock)


def per_swap(seconds: float) -> float:
    return 1000 * seconds / NUM_ADAPTERS


if __name__ == "__main__":
    main()

"""The allocator's settings, measured by page faults and memory kept; and running out of memory without a crash."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from trainhouse.workers.planner.activations import activations
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from trainhouse.workers.protocol.worker_config import DEFAULT_MICRO_BATCH_TOKENS, ServedModel, WorkerConfig
from trainhouse.workers.resources import machine
from trainhouse.workers.resources.memory import is_out_of_memory
from trainhouse.workers.scheduler.supervision import footprint
from trainhouse.workers.shapes.layouts.parameters import parameters
from trainhouse.workers.shapes.model_shape import ModelShape, read_model
from trainhouse.workers.worker.worker import Worker

COUNT_FAULTS = """
import resource, sys
import torch
from trainhouse.workers.resources.allocator import tune_allocator
if sys.argv[1] == "tuned" and not tune_allocator():
    print("other allocator")
    sys.exit()
# Small allocations take from the first large blocks that are free: it takes some rounds until none is touched.
for _ in range(60):
    torch.ones(10 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(10 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    command = [sys.executable, "-c", COUNT_FAULTS, mode]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()
    if answer == "other allocator":
        pytest.skip("the C library is not glibc")
    return int(answer)


@pytest.mark.slow
def test_a_tuned_allocator_reuses_large_blocks_without_page_faults() -> None:
    assert page_faults("tuned") < 100 < page_faults("as is")


COUNT_KEPT = """
import sys
import torch
from trainhouse.tests.benchmarks.processes.probes import resident_bytes
from trainhouse.workers.resources.allocator import tune_allocator
if sys.argv[1] == "tuned":
    tune_allocator()
weight = torch.ones(256, 256)
product = torch.ops.mkldnn._linear_pointwise
product(torch.ones(1, 256), weight, None, "none", [], "")
before = resident_bytes()
for rows in range(2, 402):
    product(torch.ones(rows, 256), weight, None, "none", [], "")
print(resident_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
def test_products_of_many_row_counts_keep_little_memory() -> None:
    # Leaves out what a worker of an earlier test has set in this process.
    environment = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}

    def kept_by(mode: str) -> int:
        command = [sys.executable, "-c", COUNT_KEPT, mode]
        return int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)

    kept = {mode: kept_by(mode) for mode in ("tuned", "as is")}
    assert kept["tuned"] < 0.5 * kept["as is"]


def error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


BOUNDED = """
import torch
from trainhouse.workers.resources import machine
from trainhouse.workers.resources.memory import bounded_memory, is_out_of_memory
def is_refused(num_bytes):
    try:
        torch.empty(num_bytes, dtype=torch.uint8)
    except Exception as error:
        assert is_out_of_memory(error)
        return True
    return False
machine.available_bytes = lambda: 4_000_000_000
with bounded_memory(torch.device("cpu")):
    inside = [is_refused(3_000_000_000), is_refused(5_000_000_000)]
print(inside, is_refused(5_000_000_000))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is not bounded")
def test_allocation_beyond_the_bound_is_refused() -> None:
    """Without the bound the allocation succeeds, because its memory is not touched.

    Runs in a new process, because memory freed by earlier tests would count.
    """
    done = subprocess.run([sys.executable, "-c", BOUNDED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, True] False"


GIVE_BACK = """
import ctypes, sys
import torch
from trainhouse.workers.resources import machine
from trainhouse.workers.resources.allocator import trim, tune_allocator
from trainhouse.workers.resources.memory import bounded_memory
tune_allocator()
blocks = [ctypes.create_string_buffer(1 << 20) for _ in range(2000)]
pins = blocks[::50]
del blocks
if sys.argv[1] == "trimmed":
    trim()
machine.available_bytes = lambda: 3_000_000_000
with bounded_memory(torch.device("cpu")):
    # Mapped separately, independent of the heap.
    torch.empty(int(sys.argv[2]), dtype=torch.uint8)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is not bounded")
@pytest.mark.parametrize(("state", "num_bytes", "fits"), [("kept", 2.5e9, True), ("trimmed", 2.5e9, False)])
def test_returned_memory_is_not_counted_twice(state: str, num_bytes: float, fits: bool) -> None:
    """The process can still fill its trimmed heap with two of the three available gigabytes."""
    command = [sys.executable, "-c", GIVE_BACK, state, str(int(num_bytes))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) == fits, done.stderr
    assert fits or "can't allocate memory" in done.stderr


def test_page_cache_counts_as_available_in_a_container(tmp_path: Path) -> None:
    """After a while of writing files, all of the limit is used, and most of it can be reclaimed."""
    for name, text in {"max": "1000", "current": "990", "stat": "anon 90\nactive_file 300\ninactive_file 600"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert list(machine.available_to(tmp_path)) == [910]
    (tmp_path / "memory.max").write_text("max\n")
    assert list(machine.available_to(tmp_path)) == []


@pytest.mark.parametrize("layout", ["single", "replicas=2", "ep=2", "fsdp=2,ep=2", "ep=2,tp=2"])
def test_models_need_the_memory_that_their_ranks_keep(
    layout: str, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, served = ParallelSpec.parse(layout), ServedModel("tiny", str(tiny_models["qwen3_moe"]))
    shape = read_model(served)
    assert isinstance(shape, ModelShape)
    needed = 4 * spec.num_ranks * sum(each.kept for each in parameters(shape, spec))
    copies = [WorkerConfig(served, device="cpu", parallel=spec)] * spec.num_ranks
    monkeypatch.setattr(footprint, "available_bytes", lambda: needed)
    footprint.check_fit([copies])
    footprint.check_fit([copies, copies[:1], copies], take_turns=True)
    with pytest.raises(ValueError, match="serve fewer or smaller models"):
        footprint.check_fit([copies, copies[:1]])
    monkeypatch.setattr(footprint, "available_bytes", lambda: needed - 8)
    for take_turns in (False, True):
        with pytest.raises(ValueError, match="serve fewer or smaller models"):
            footprint.check_fit([copies], take_turns)


def test_micro_batches_fill_a_third_of_the_free_memory(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Holds unless their size is given or their usual size fits."""
    served = ServedModel("tiny", str(tiny_models["qwen3"]))
    shape = read_model(served)
    assert isinstance(shape, ModelShape)
    of_1024 = 3 * activations(shape, SINGLE, Workload(longest=1024, dtype="float32", micro_batch_tokens=1024)).total

    def tokens(free: int, micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS) -> int:
        monkeypatch.setattr(machine, "available_bytes", lambda: free)
        config = WorkerConfig(served, device="cpu", threads=1, micro_batch_tokens=micro_batch_tokens)
        return Worker(config).info().micro_batch_tokens

    assert [tokens(of_1024, micro_batch_tokens=0), tokens(of_1024 - 8, micro_batch_tokens=0)] == [1024, 768]
    assert "micro-batches have at most 768 tokens instead of 4096" in caplog.text
    caplog.clear()
    assert tokens(10 * of_1024, micro_batch_tokens=0) == tokens(of_1024) == 4096
    assert tokens(of_1024, micro_batch_tokens=2000) == 2000
    assert not caplog.text


def test_out_of_memory_is_distinguished_from_other_errors() -> None:
    allocations = [lambda: torch.empty(1 << 50), lambda: np.empty(1 << 50), lambda: bytearray(1 << 50)]
    errors = [error_of(call) for call in allocations]
    assert all(error is not None and is_out_of_memory(error) for error in errors)
    others = [error_of(lambda: torch.ones(2) @ torch.ones(3)), error_of(lambda: 1 // 0)]
    assert not any(error is None or is_out_of_memory(error) for error in others)

"""Tests a rank that leaves its device: everything is reloaded bit-equal when it is needed, and nothing is lost."""

import errno
import os
import statistics
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import FullConfig, LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.protocol.calls import OperationPart, RunSpec, SamplingSlice
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.state.offload import Offload
from trainhouse.workers.worker import rank_memory
from trainhouse.workers.worker.worker import Worker

from ...tiny import tiny_model
from ..jobs import answers, job
from ..model_state import weights_of
from ..training.test_full import run, some_data, stepped, supervised

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]
KINDS = ["llama", "qwen3", "qwen3_moe", "gemma3"]


def new_worker(directory: Path, device: str = "cpu", **options: Any) -> Worker:
    return Worker(WorkerConfig(ServedModel("tiny", str(directory)), device=device, threads=1, **options))


def with_runs(worker: Worker) -> Worker:
    """Creates a LoRA run and a full run, with gradients, and returns the worker."""
    worker.create_run(RunSpec("lora", LoraConfig(rank=4, seed=1)))
    worker.create_run(RunSpec("full", FullConfig(seed=2)))
    for run_id in ("lora", "full"):
        run(worker, supervised(run_id, some_data(1)))
    return worker


def comparable(output: ForwardBackwardOutput) -> list[Any]:
    """Returns all but the part of the peak that the pass reached."""
    metrics = {name: value for name, value in output.metrics.items() if name != "mfu:mean"}
    return [metrics, [each["logprobs"].tolist() for each in output.loss_fn_outputs]]


def tokens_and_logprobs(response: SampleResponse) -> list[Any]:
    return [(each.tokens.tolist(), np.asarray(each.logprobs).tolist()) for each in response.sequences]


# Each verb, and whether it must leave the base's weights and the sampler's cache on the device.
VERBS: list[tuple[str, Callable[[Worker], Any], tuple[bool, bool]]] = [
    ("forward_backward", lambda worker: comparable(run(worker, supervised("lora", some_data(2)))[0]), (True, False)),
    ("optim_step", lambda worker: stepped(worker, "lora"), (False, False)),
    ("optim_step of a full model", lambda worker: stepped(worker, "full"), (False, False)),
    (
        "forward of a full model",
        lambda worker: comparable(run(worker, supervised("full", some_data(3)))[0]),
        (True, False),
    ),
    ("export", lambda worker: worker.export_adapter("full").weights.tolist(), (False, False)),
    ("clear_gradients", lambda worker: worker.clear_gradients("lora"), (False, False)),
    ("sample", lambda worker: sampled(worker, "lora"), (True, True)),
    ("sample a full model", lambda worker: sampled(worker, "full"), (True, True)),
    ("sample the base", lambda worker: sampled(worker, None), (True, True)),
    ("create", lambda worker: worker.create_run(RunSpec("new", FullConfig(seed=3))).num_parameters, (True, False)),
    ("drop", lambda worker: worker.drop_run("new"), (False, False)),
]


def sampled(worker: Worker, adapter_id: str | None) -> list[Any]:
    found = answers(worker.sample_slice, job("job", [*range(3, 60)], adapter_id, max_tokens=9))
    return tokens_and_logprobs(found["job"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_verb_reloads_what_it_needs(kind: str, device: str, tmp_path: Path) -> None:
    directory = tiny_model(kind, tmp_path / "base")
    moving, staying = with_runs(new_worker(directory, device)), with_runs(new_worker(directory, device))
    for name, act, wanted in VERBS:
        moving.offload()
        memory = moving.memory()
        assert memory["base_weights_on_device"] == memory["kv_cache_on_device"] == 0, name
        assert memory["base_weights"] == staying.memory()["base_weights"], name
        assert memory["num_adapters_on_device"] == memory["num_full_models_on_device"] == 0, name
        assert act(moving) == act(staying), name
        memory = moving.memory()
        has_base, has_cache = memory["base_weights_on_device"] > 0, memory["kv_cache_on_device"] > 0
        assert (has_base, has_cache) == wanted, name
        assert memory["base_weights_on_device"] in (0, memory["base_weights"]), name
    assert moving.memory()["offloads"] == len(VERBS)


@pytest.mark.parametrize("device", DEVICES)
def test_samples_continue_across_offloads(device: str, tmp_path: Path) -> None:
    directory = tiny_model("qwen3", tmp_path / "base")
    moving, staying = with_runs(new_worker(directory, device)), with_runs(new_worker(directory, device))
    jobs = [
        job(f"{adapter_id} {number}", [*range(3, 40 + number)], adapter_id, num_samples=2, max_tokens=20)
        for adapter_id in (None, "lora", "full")
        for number in range(3)
    ]
    expected = answers(staying.sample_slice, *jobs)
    found, joining, held = {}, tuple(jobs), []
    for _ in range(400):
        result = moving.sample_slice(SamplingSlice(joining, (), 0.0))
        found |= result.finished
        joining = ()
        if not result.num_active:
            break
        held.append(moving.memory()["kv_cache_held"])
        moving.offload()
    assert {name: tokens_and_logprobs(each) for name, each in found.items()} == {
        name: tokens_and_logprobs(each) for name, each in expected.items()
    }
    assert len(held) > 15 and max(held) > 0


@pytest.mark.slow
def test_offloading_frees_memory_and_repeating_it_takes_no_more(tmp_path: Path) -> None:
    """Measures the anonymous memory of the process."""
    directory = tiny_model("llama", tmp_path / "base", vocab_size=40_000, hidden_size=256)
    worker = with_runs(new_worker(directory))
    base = worker.memory()["base_weights"]
    assert base > 40_000_000
    loaded, offloaded = [], []
    for step in range(12):
        for run_id in ("lora", "full"):
            stepped(worker, run_id)
            run(worker, supervised(run_id, some_data(step)))
        loaded.append(_resident_bytes())
        worker.offload()
        offloaded.append(_resident_bytes())
    loaded, offloaded = loaded[2:], offloaded[2:]  # at first, the weights are in a mapped file
    freed = [before - after for before, after in zip(loaded, offloaded, strict=True)]
    assert statistics.median(freed) > 0.9 * base
    assert offloaded[-1] - min(offloaded) < 0.5 * base and loaded[-1] - min(loaded) < 0.5 * base
    worker.clear_gradients("full")
    worker.offload()
    full_bytes = 3 * base  # weights and moments
    assert min(offloaded) - _resident_bytes() > 0.9 * full_bytes


def _resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def fail_from_call(call: str, monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Makes a function of `os` fail from its `number`-th call on; returns a list that grows with each call."""
    working, calls = getattr(os, call), []

    def failing(*arguments: Any) -> int:
        calls.append(1)
        if len(calls) >= number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return working(*arguments)

    monkeypatch.setattr(os, call, failing)
    return calls


def test_after_a_failed_offload_everything_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_model("qwen3", tmp_path / "base")
    worker, staying = with_runs(new_worker(directory)), with_runs(new_worker(directory))
    with monkeypatch.context() as patch:
        fail_from_call("pwrite", patch, 2)
        with pytest.raises(OperationError, match=r"cannot leave the device: .*Input/output error"):
            worker.offload()
    memory = worker.memory()
    assert memory["base_weights_on_device"] == memory["base_weights"] and memory["offloads"] == 0
    for name, act, _ in VERBS:
        assert act(worker) == act(staying), name
    worker.offload()
    assert worker.memory()["base_weights_on_device"] == 0


def test_after_a_failed_reload_the_next_call_reloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_model("qwen3", tmp_path / "base")
    worker, staying = with_runs(new_worker(directory)), with_runs(new_worker(directory))
    monkeypatch.setattr(rank_memory, "_RETRY_SECONDS", (0.0, 0.0))
    first = job("job", [*range(3, 60)], "lora", max_tokens=9)
    for each in (worker, staying):
        each.sample_slice(SamplingSlice((first,), (), 0.0))
    worker.offload()
    with monkeypatch.context() as patch:
        calls = fail_from_call("preadv", patch, 2)
        with pytest.raises(OperationError, match="the base model cannot be brought back to the device") as raised:
            worker.run_pass((OperationPart(0, supervised("lora", some_data(2))),))
        assert len(calls) > 3 and raised.value.category == "server"
        assert worker.memory()["base_weights_on_device"] == 0
        with pytest.raises(OperationError, match="the base model cannot be brought back to the device"):
            worker.sample_slice(SamplingSlice((), (), 0.0))
    # The caller has failed all jobs by now, so none of them continues or holds memory.
    assert worker.memory()["kv_cache"] == 0 and not answers(worker.sample_slice)
    staying.sample_slice(SamplingSlice((), ("job",), 0.0))
    for name, act, _ in VERBS:
        assert act(worker) == act(staying), name


def test_a_reload_is_retried_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = with_runs(new_worker(tiny_model("qwen3", tmp_path / "base")))
    worker.offload()
    working = os.preadv

    def fail_once(*arguments: Any) -> int:
        if threading.current_thread() is threading.main_thread() and not failures:
            failures.append(1)
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return working(*arguments)

    failures: list[int] = []
    monkeypatch.setattr(rank_memory, "_RETRY_SECONDS", (0.0,))
    monkeypatch.setattr(os, "preadv", fail_once)
    run(worker, supervised("lora", some_data(2)))
    assert failures


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_offloaded_tensors_stay_valid(device: str) -> None:
    whole = torch.randn(50, 40, device=device)
    views: Sequence[Tensor] = [whole[10:20].t(), whole.flatten()[7:], whole[:, 3]]
    expected = [each.clone() for each in (whole, *views)]
    frozen = Offload("weights", torch.device(device), is_frozen=True)
    for _ in range(3):
        frozen.offload([views[0], whole, *views])
        assert frozen.num_offloaded_bytes == whole.nbytes and whole.untyped_storage().nbytes() == 0
        frozen.reload()
        assert all(torch.equal(one, other) for one, other in zip((whole, *views), expected, strict=True))
    assert frozen.moved_bytes == 4 * whole.nbytes  # copied once, and read three times


def test_an_optimizer_cleared_while_offloaded_is_not_reloaded(tmp_path: Path) -> None:
    """The run has ended, but samplers still use its weights."""
    worker = with_runs(new_worker(tiny_model("qwen3", tmp_path / "base"), full_sampling="inflight"))
    stepped(worker, "full")
    worker.copy_adapter("full", "sampler")
    expected = sampled(worker, "sampler")
    worker.offload()
    worker.drop_run("full")
    assert sampled(worker, "sampler") == expected
    memory = worker.memory()
    assert memory["full_models"] == 4 * weights_of(worker, "sampler").numel()


def test_changing_tensors_are_copied_each_time() -> None:
    tensor = torch.zeros(3000)
    changing = Offload("cache", torch.device("cpu"))
    for value in range(3):
        tensor.fill_(value)
        changing.offload([tensor])
        changing.reload()
        assert (tensor == value).all()
        changing.discard_copy()
    tensor.fill_(5)
    changing.offload([tensor])
    changing.reload()
    changing.offload([tensor])  # unused since the reload
    changing.reload()
    assert (tensor == 5).all() and changing.moved_bytes == 9 * tensor.nbytes

"""Tests that adapters move from the device to host memory to disk and back, bit-equal."""

import errno
import logging
import os
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SampleResponse, SamplingParams
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.lora import Adapter, LoraLayers
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.protocol.calls import (
    Failure,
    OperationPart,
    OptimizerStep,
    RunSpec,
    SampleJob,
    SamplingSlice,
)
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.registry.model_registry import KINDS, ModelRegistry
from trainhouse.workers.state.optim import apply_steps
from trainhouse.workers.state.page_file import FilePage, PageFile
from trainhouse.workers.state.residency import Residency
from trainhouse.workers.worker.worker import Worker

from ...drawn import Drawn, as_drawn
from ..adapted import copy_adapter, create_adapter

LORA = LoraConfig(rank=8, train_mlp=False, train_unembed=False)
CPU = torch.device("cpu")


def config(directory: Path, device: str = "cpu", **options: object) -> WorkerConfig:
    return WorkerConfig(ServedModel("tiny", str(directory)), device=device, threads=1, **options)  # pyright: ignore[reportArgumentType]


def new_registry(directory: Path, slots: int, host_adapters: int, device: str = "cpu") -> ModelRegistry:
    """Returns a registry with room for this many trained adapters on the device and in host memory."""
    base = BaseModel(config(directory, device))
    size = LoraLayers(base, 64).build(LORA).weights.nbytes
    # A base can be wrapped only once.
    base = BaseModel(config(directory, device))
    return ModelRegistry(base, LoraLayers(base, 64), residency_of(base, slots, 3 * size * host_adapters))


def residency_of(base: BaseModel, slots: int, host_bytes: int) -> Residency:
    return Residency(base.device, dict.fromkeys(KINDS, slots), host_bytes)


def accumulate(adapter: Adapter, seed: int) -> None:
    adapter.gradients.begin_operation()
    adapter.gradients.scratch.copy_(torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(seed)))
    adapter.gradients.commit(num_tokens=3, weight_sum=2.0, losses={"loss": float(seed)})


def train(adapters: ModelRegistry, adapter_id: str, seed: int) -> None:
    with adapters.resident([adapter_id]) as (adapter,):
        accumulate(adapter, seed)
        (metrics,) = apply_steps([adapter], [OptimizerStep(adapter_id, AdamParams(learning_rate=1e-2))])
    assert isinstance(metrics, dict)


def state(adapters: ModelRegistry, adapter_id: str) -> tuple[object, ...]:
    """Returns all that must survive, in a form that compares bit by bit."""
    with adapters.resident([adapter_id]) as (adapter,):
        vectors = {name: vector.cpu().numpy().tobytes() for name, vector in adapter.live_vectors().items()}
        return vectors, adapter.num_steps, adapter.gradients.window


def places(adapters: ModelRegistry) -> list[int]:
    memory = adapters.residency.memory()
    return [memory[f"num_adapters_on_{place}"] for place in ("device", "host", "disk")]


DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_are_reloaded_from_disk_bit_equal(device: str, tiny_models: dict[str, Path]) -> None:
    paged = new_registry(tiny_models["llama"], slots=1, host_adapters=1, device=device)
    unpaged = new_registry(tiny_models["llama"], slots=9, host_adapters=0, device=device)
    for i in range(6):
        for adapters in (paged, unpaged):
            create_adapter(adapters, f"run-{i}", LORA.model_copy(update={"seed": i}))
            train(adapters, f"run-{i}", i)
            train(adapters, f"run-{i}", i + 10)
    assert places(paged) == [1, 1, 4]
    assert places(unpaged) == [6, 0, 0]
    for i in range(6):
        assert state(paged, f"run-{i}") == state(unpaged, f"run-{i}")
    train(paged, "run-3", 20)
    assert state(paged, "run-3") != state(unpaged, "run-3")


@contextmanager
def resident(adapters: ModelRegistry, adapter_id: str) -> Iterator[Adapter]:
    with adapters.resident([adapter_id]) as (adapter,):
        yield adapter


def begin_and_commit(adapters: ModelRegistry, adapter_id: str, seed: int) -> None:
    with resident(adapters, adapter_id) as adapter:
        accumulate(adapter, seed)


def clear(adapters: ModelRegistry, adapter_id: str, _seed: int) -> None:
    with resident(adapters, adapter_id) as adapter:
        adapter.gradients.clear_window()


def clear_moments(adapters: ModelRegistry, adapter_id: str, _seed: int) -> None:
    with resident(adapters, adapter_id) as adapter:
        adapter.clear_optimizer()


def scale(adapters: ModelRegistry, adapter_id: str, seed: int) -> None:
    with resident(adapters, adapter_id) as adapter:
        adapter.pairs[adapter.targets[0].name].a.mul_(1 + 1 / (seed + 2))


def copy(adapters: ModelRegistry, adapter_id: str, seed: int) -> None:
    copy_adapter(adapters, adapter_id, f"run-{seed % 8}")


def recreate(adapters: ModelRegistry, adapter_id: str, seed: int) -> None:
    adapters.drop(adapter_id)
    create_adapter(adapters, adapter_id, LORA.model_copy(update={"seed": seed}))


def read_state(adapters: ModelRegistry, adapter_id: str, _seed: int) -> None:
    state(adapters, adapter_id)


ACTIONS: list[Callable[[ModelRegistry, str, int], None]] = [
    train, begin_and_commit, clear, clear_moments, scale, copy, recreate, read_state, read_state,
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_paged_adapters_equal_unpaged_ones_after_random_actions(device: str, tiny_models: dict[str, Path]) -> None:
    paged = new_registry(tiny_models["llama"], slots=2, host_adapters=2, device=device)
    unpaged = new_registry(tiny_models["llama"], slots=8, host_adapters=0, device=device)
    draw = random.Random(4)
    for i in range(8):
        for adapters in (paged, unpaged):
            create_adapter(adapters, f"run-{i}", LORA)
    seen = set()
    for seed in range(600):
        action, adapter_id = draw.choice(ACTIONS), f"run-{draw.randrange(8)}"
        for adapters in (paged, unpaged):
            action(adapters, adapter_id, seed)
        seen.add(tuple(places(paged)))
        assert state(paged, adapter_id) == state(unpaged, adapter_id), (seed, action.__name__)
    assert len(seen) > 4 and max(on_disk for *_, on_disk in seen) >= 4


def test_a_few_adapters_never_touch_the_disk(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(config(tiny_models["llama"]))
    monkeypatch.setattr(PageFile, "write", lambda *_: pytest.fail("a page was written"))
    for i in range(80):
        worker.create_run(RunSpec(f"run-{i}", LORA))
    memory = worker.memory()
    assert (memory["num_adapters_on_device"], memory["num_adapters_on_host"]) == (64, 16)


def test_an_adapter_that_holds_gradients_stays_in_memory(tiny_models: dict[str, Path]) -> None:
    adapters = new_registry(tiny_models["llama"], slots=1, host_adapters=0)
    for adapter_id in ("window", "open", "idle"):
        create_adapter(adapters, adapter_id, LORA)
    begin_and_commit(adapters, "window", 1)
    with adapters.resident(["open"]) as (opened,):
        opened.gradients.begin_operation()
        opened.gradients.scratch.fill_(2.0)
    state(adapters, "idle")
    assert places(adapters) == [1, 2, 0]
    with adapters.resident(["open"]):
        assert (opened.gradients.scratch == 2.0).all()
        opened.gradients.abandon_operation()
    train(adapters, "idle", 1)
    assert places(adapters) == [1, 1, 1]
    with adapters.resident(["window"]) as (kept,):
        assert kept.gradients.accumulator.norm() > 1
        assert kept.gradients.window.losses == {"loss": 1.0}


def test_only_trained_state_is_paged(tiny_models: dict[str, Path]) -> None:
    adapters = new_registry(tiny_models["llama"], slots=1, host_adapters=0)
    size = create_adapter(adapters, "fresh", LORA).weights.nbytes
    create_adapter(adapters, "trained", LORA)
    assert adapters.residency.memory()["adapters_on_disk"] == size
    train(adapters, "trained", 1)
    state(adapters, "fresh")
    assert adapters.residency.memory()["adapters_on_disk"] == 3 * size
    assert adapters.get("fresh").vectors.in_memory().keys() == {"weights"}


def test_an_unchanged_adapter_is_not_written_again(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = new_registry(tiny_models["llama"], slots=1, host_adapters=0)
    for adapter_id in ("one", "other"):
        create_adapter(adapters, adapter_id, LORA)
    state(adapters, "one")
    written: list[FilePage] = []
    write = PageFile.write
    monkeypatch.setattr(PageFile, "write", lambda *args: written.append(write(*args)) or written[-1])
    for _ in range(3):
        for adapter_id in ("one", "other"):
            state(adapters, adapter_id)
    assert not written
    train(adapters, "one", 1)
    state(adapters, "other")
    assert len(written) == 1


def test_a_dropped_adapter_frees_its_page(tiny_models: dict[str, Path]) -> None:
    adapters = new_registry(tiny_models["llama"], slots=1, host_adapters=0)
    for i in range(5):
        create_adapter(adapters, f"run-{i}", LORA)
    assert adapters.residency.memory()["adapters_on_disk"] > 0
    for adapter_id in adapters:
        adapters.drop(adapter_id)
    assert {value for name, value in adapters.residency.memory().items() if "moved" not in name} == {0}


def test_an_adapter_off_the_device_cannot_be_used(tiny_models: dict[str, Path]) -> None:
    adapters = new_registry(tiny_models["llama"], slots=1, host_adapters=9)
    first, _second = (create_adapter(adapters, adapter_id, LORA) for adapter_id in ("first", "second"))
    with pytest.raises(AssertionError, match="the model is on host"):
        _ = first.weights
    with pytest.raises(AssertionError, match="the model is on host"):
        _ = first.pairs[first.targets[0].name].a
    with (
        pytest.raises(AssertionError, match="2 models wanted on the device at a time, more than its 1 slots"),
        adapters.resident(["first", "second"]),
    ):
        pass
    with pytest.raises(KeyError, match="no model 'third'"), adapters.resident(["third"]):
        pass


def test_adapters_in_use_are_not_offloaded_for_others(tiny_models: dict[str, Path]) -> None:
    adapters = new_registry(tiny_models["llama"], slots=2, host_adapters=0)
    for i in range(4):
        create_adapter(adapters, f"run-{i}", LORA)
    with adapters.resident(["run-0"]) as (held,):
        for i in range(1, 4):
            with adapters.resident([f"run-{i}"]) as (other,):
                assert held.vectors.place == other.vectors.place == "device"


def test_a_bfloat16_base_uses_the_reloaded_weights(tiny_models: dict[str, Path]) -> None:
    base = BaseModel(WorkerConfig(ServedModel("tiny", str(tiny_models["llama"])), device="cpu", dtype="bfloat16"))
    adapters = ModelRegistry(base, LoraLayers(base, 64), residency_of(base, 1, 0))
    for adapter_id in ("one", "other"):
        create_adapter(adapters, adapter_id, LORA)
        train(adapters, adapter_id, 1)
        with adapters.resident([adapter_id]) as (adapter,):
            adapter.vectors.weight_views()
    train(adapters, "one", 2)
    with adapters.resident(["one"]) as (adapter,):
        name = adapter.targets[0].name
        assert torch.equal(adapter.vectors.weight_views()[name][1].t(), adapter.pairs[name].b.bfloat16())
        assert adapter.vectors.weight_views()[name][1].any()


@contextmanager
def full_disk() -> Iterator[None]:
    """Limits files of this process to one block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_adapters_stay_in_memory_when_the_disk_is_full(
    tiny_models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    adapters = new_registry(tiny_models["llama"], slots=1, host_adapters=0)
    with full_disk(), caplog.at_level(logging.WARNING):
        for i in range(3):
            create_adapter(adapters, f"run-{i}", LORA)
    assert places(adapters) == [1, 2, 0]
    assert "stays in host memory: [Errno 27] File too large" in caplog.text
    state(adapters, "run-0")
    assert places(adapters) == [1, 0, 2]


def test_pages_have_no_name_that_could_outlive_the_process(tmp_path: Path) -> None:
    pages = PageFile(str(tmp_path / "new"))
    pages.write([torch.ones(5000)])
    assert list((tmp_path / "new").iterdir()) == []


def test_a_page_directory_that_cannot_be_written_to_is_refused(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"page_directory .*/file/pages cannot be written to"):
        Worker(config(tiny_models["llama"], page_directory=str(tmp_path / "file" / "pages")))


def test_pages_keep_their_content_and_the_file_stays_bounded() -> None:
    pages, draw = PageFile(None), random.Random(1)
    kept: dict[int, tuple[FilePage, list[Tensor]]] = {}
    most_bytes = most_end = 0
    for i in range(2000):
        if len(kept) > 20:
            pages.free(kept.pop(draw.choice(list(kept)))[0])
        vectors = [torch.randn(draw.randrange(1, 5000)) for _ in range(draw.randrange(1, 4))]
        kept[i] = pages.write(vectors), vectors
        most_bytes = max(most_bytes, sum(page.num_bytes for page, _ in kept.values()))
        most_end = max(most_end, max(page.stop for page, _ in kept.values()))
    for page, vectors in kept.values():
        found = [torch.empty_like(vector) for vector in vectors]
        pages.read(page, found)
        assert all(map(torch.equal, found, vectors))
    assert most_end < 2 * most_bytes
    for page, _ in kept.values():
        pages.free(page)
    assert pages.write([torch.ones(1)]).offset == 0


def test_jobs_of_more_adapters_than_slots_sample_the_same(tiny_models: dict[str, Path]) -> None:
    answers = []
    for slots in (2, 64):
        worker = Worker(config(tiny_models["qwen3"], adapter_slots=slots, host_adapter_bytes=0))
        for i in range(5):
            worker.create_run(RunSpec(f"run-{i}", LORA.model_copy(update={"seed": i})))
            assert isinstance(train_step(worker, [f"run-{i}"])[0], dict)
            worker.copy_adapter(f"run-{i}", f"sampler-{i}")
        jobs = [sample_job(i, adapter_id) for i, adapter_id in enumerate([*(f"sampler-{i}" for i in range(5)), None])]
        answers.append(run_jobs(worker, [*jobs, sample_job(6, "sampler-1")]))
    few, all_at_once = answers
    assert few == all_at_once
    assert len({tuple(tokens) for tokens in few.values()}) == 7


def sample_job(number: int, adapter_id: str | None) -> SampleJob:
    params = SamplingParams(seed=number, max_tokens=8)
    return SampleJob(f"job-{number}", adapter_id, np.arange(3, 9, dtype=np.int32), params, (), ())


def run_jobs(worker: Worker, jobs: list[SampleJob]) -> dict[str, Drawn]:
    """Samples in slices of one iteration and returns the tokens of each job."""
    result = worker.sample_slice(SamplingSlice(tuple(jobs), (), 0.0))
    found = dict(result.finished)
    for _ in range(200):
        if not result.num_active:
            break
        result = worker.sample_slice(SamplingSlice((), (), 0.0))
        found |= result.finished
    assert all(isinstance(response, SampleResponse) for response in found.values())
    return {job_id: as_drawn(response.sequences[0]) for job_id, response in sorted(found.items())}


def train_step(worker: Worker, run_ids: list[str]) -> tuple[dict[str, float] | Failure, ...]:
    """Trains each run for one step, all in one pass."""
    run_pass(worker, run_ids)
    return worker.apply_steps(tuple(OptimizerStep(run_id, AdamParams(learning_rate=1e-2)) for run_id in run_ids))


def run_pass(worker: Worker, run_ids: list[str]) -> None:
    parts = [
        OperationPart(i, ForwardBackwardRequest(run_id, 1, (datum(run_id),), "cross_entropy"))
        for i, run_id in enumerate(run_ids)
    ]
    outputs = worker.run_pass(tuple(parts))
    assert all(isinstance(output, ForwardBackwardOutput) for output in outputs), outputs


def datum(run_id: str) -> Datum:
    tokens = np.random.default_rng(int(run_id.rpartition("-")[2])).integers(3, 512, 7)
    weights = np.ones(6, np.float32)
    return Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:], "weights": weights})


def test_steps_of_more_runs_than_slots_are_applied(tiny_models: dict[str, Path]) -> None:
    worker = Worker(config(tiny_models["llama"], adapter_slots=2, host_adapter_bytes=0))
    for i in range(5):
        worker.create_run(RunSpec(f"run-{i}", LORA))
    for i in range(5):
        run_pass(worker, [f"run-{i}"])
    step_ids = ["run-3", "run-0", "gone", "run-0", "run-1", "run-2", "run-4"]
    answers = worker.apply_steps(tuple(OptimizerStep(run_id, AdamParams()) for run_id in step_ids))
    assert [isinstance(answer, dict) for answer in answers] == [True, True, False, False, True, True, True]
    assert isinstance(answers[2], Failure) and "run gone is not on this worker" in answers[2].message
    assert isinstance(answers[3], Failure) and "no gradients since the last step" in answers[3].message


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError("no room")], ids=repr)
def test_an_adapter_that_cannot_be_reloaded_fails_only_its_run(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken_disk(*_: object) -> int:
        raise error

    worker = Worker(config(tiny_models["llama"], adapter_slots=3, host_adapter_bytes=0))
    for i in range(4):
        worker.create_run(RunSpec(f"run-{i}", LORA))
    run_pass(worker, ["run-1", "run-3"])
    assert worker._models.get("run-0").vectors.place == "disk"
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken_disk)
        answers = worker.apply_steps(tuple(OptimizerStep(f"run-{i}", AdamParams()) for i in (1, 0, 3)))
    assert [isinstance(answer, dict) for answer in answers] == [True, False, True]
    assert isinstance(answers[1], Failure) and answers[1].category == "server", answers[1]
    assert f"a model's trained state cannot be brought back from disk: {error}" in answers[1].message
    assert isinstance(train_step(worker, ["run-0"])[0], dict)


def cut_off_page(adapters: ModelRegistry, adapter_id: str) -> None:
    """Truncates the file before the adapter's page; other pages stay whole."""
    residency = adapters.residency
    page = residency._saved[adapters.get(adapter_id)].page
    assert adapters.get(adapter_id).vectors.place == "disk" and page.stop == residency._pages._size
    os.ftruncate(residency._pages._file, page.offset)


def test_an_adapter_that_cannot_be_reloaded_fails_only_its_samples(tiny_models: dict[str, Path]) -> None:
    worker = Worker(config(tiny_models["llama"], adapter_slots=2, host_adapter_bytes=0))
    for i in range(4):
        worker.create_run(RunSpec(f"run-{i}", LORA.model_copy(update={"seed": i})))
    for run_id in ("run-1", "run-2", "run-3", "run-0"):
        train_step(worker, [run_id])
    jobs = [sample_job(i, adapter_id) for i, adapter_id in enumerate(["run-0", "run-1", None, "run-2"])]
    expected = run_jobs(worker, jobs)
    # Both adapters of running samples leave the device, and one cannot be reloaded.
    worker.sample_slice(SamplingSlice(tuple(jobs), (), 0.0))
    for run_id in ("run-2", "run-3"):
        state(worker._models, run_id)
    cut_off_page(worker._models, "run-0")
    result = worker.sample_slice(SamplingSlice((sample_job(4, "run-0"),), (), 0.0))
    assert set(result.finished) == {"job-0", "job-4"}
    for failure in result.finished.values():
        assert isinstance(failure, Failure) and failure.category == "server", failure
        assert "a model's trained state cannot be brought back from disk: the page file ends" in failure.message
    assert run_jobs(worker, []) == {job_id: tokens for job_id, tokens in expected.items() if job_id != "job-0"}


NUM_RUNS, NUM_SLOTS = 1000, 16


@pytest.mark.full
def test_a_thousand_runs_on_sixteen_slots_train_as_without_paging(tiny_models: dict[str, Path]) -> None:
    unpaged = Worker(config(tiny_models["llama"], adapter_slots=NUM_RUNS))
    unpaged.create_run(RunSpec("run-0", LORA))
    page_bytes = 3 * unpaged.memory()["adapters"]
    paged = Worker(config(tiny_models["llama"], adapter_slots=NUM_SLOTS, host_adapter_bytes=100 * page_bytes))
    turns = [
        [f"run-{i}" for i in range(start, min(start + NUM_SLOTS, NUM_RUNS))] for start in range(0, NUM_RUNS, NUM_SLOTS)
    ]
    compared = turns[::20]
    for run_id in (run_id for turn in turns for run_id in turn):
        paged.create_run(RunSpec(run_id, LORA))
    for run_id in (run_id for turn in compared for run_id in turn if run_id != "run-0"):
        unpaged.create_run(RunSpec(run_id, LORA))
    for _ in range(2):
        for turn in turns:
            answers = train_step(paged, turn)
            assert all(isinstance(answer, dict) for answer in answers), answers
            if turn in compared:
                assert answers == train_step(unpaged, turn)
    memory = paged.memory()
    assert [memory[f"num_adapters_on_{place}"] for place in ("device", "host", "disk")] == [NUM_SLOTS, 100, 884]
    assert memory["adapters_on_host"] == 100 * page_bytes and memory["adapters_on_disk"] >= 884 * page_bytes
    for run_id in (run_id for turn in compared for run_id in turn):
        assert state(paged._models, run_id) == state(unpaged._models, run_id)

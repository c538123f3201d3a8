"""Tests the worker as it runs on a GPU: bfloat16 base, float32 adapters.

They run on CUDA if it is available (`make test-gpu`), else on the CPU, without a server, a pool, Ray or the SDK.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trainhouse.schemas.models import FullConfig, LoraConfig
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.protocol.calls import Failure, OperationPart, OptimizerStep, RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.training import pass_runner as runner
from trainhouse.workers.worker.loading import sized_for_device
from trainhouse.workers.worker.worker import Worker

from ..jobs import answers, job

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 512
# Tolerance for bfloat16 log-probabilities computed in another order: measured up to 0.04 nats on the CPU.
BF16_NATS = 0.15

NewWorker = Callable[..., Worker]


@pytest.fixture
def new_worker(tiny_models: dict[str, Path]) -> Iterator[NewWorker]:
    def new(kind: str = "qwen3", **options: Any) -> Worker:
        defaults = {"device": DEVICE, "dtype": "bfloat16", "kv_cache_bytes": 64 << 20}
        return Worker(WorkerConfig(ServedModel("tiny", str(tiny_models[kind])), **(defaults | options)))

    yield new
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def rows(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCAB, length + 1).astype(np.int32) for length in lengths]


def request(run_id: str, data: Sequence[np.ndarray], forward_only: bool = False) -> ForwardBackwardRequest:
    datums = tuple(
        Datum(row[:-1], {"target_tokens": row[1:].astype(np.int64), "weights": np.ones(len(row) - 1, np.float32)})
        for row in data
    )
    return ForwardBackwardRequest(run_id, 1, datums, "cross_entropy", forward_only=forward_only)


def run_pass(worker: Worker, *requests: ForwardBackwardRequest) -> list[ForwardBackwardOutput]:
    outputs = worker.run_pass(tuple(OperationPart(number, each) for number, each in enumerate(requests)))
    assert all(isinstance(output, ForwardBackwardOutput) for output in outputs), outputs
    return [output for output in outputs if isinstance(output, ForwardBackwardOutput)]


def logprobs(worker: Worker, run_id: str, data: Sequence[np.ndarray]) -> list[np.ndarray]:
    (output,) = run_pass(worker, request(run_id, data, forward_only=True))
    return [np.asarray(each["logprobs"]) for each in output.loss_fn_outputs]


def train(worker: Worker, *run_ids: str, learning_rate: float = 1e-2, num_steps: int = 3) -> None:
    """Trains each run on different data, so that no two of them are alike."""
    for step in range(num_steps):
        run_pass(worker, *(request(each, rows(24, 9, seed=10 * step + n)) for n, each in enumerate(run_ids)))
        stepped = worker.apply_steps(
            tuple(OptimizerStep(each, AdamParams(learning_rate=learning_rate)) for each in run_ids)
        )
        assert not any(isinstance(each, Failure) for each in stepped), stepped


def new_run(worker: Worker, run_id: str, rank: int = 8, seed: int = 0) -> None:
    worker.create_run(RunSpec(run_id, LoraConfig(rank=rank, seed=seed)))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "qwen3_moe"])
def test_twenty_steps_in_bfloat16_halve_the_loss(new_worker: NewWorker, kind: str) -> None:
    worker = new_worker(kind)
    assert worker.info().dtype == "bfloat16" and worker.info().device.startswith(DEVICE)
    new_run(worker, "run")
    data, losses = rows(32), []
    for _ in range(20):
        losses += [output.metrics["loss:sum"] for output in run_pass(worker, request("run", data))]
        worker.apply_steps((OptimizerStep("run", AdamParams(learning_rate=1e-2)),))
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "qwen3_moe"])
def test_samples_have_the_trainers_logprobs(new_worker: NewWorker, kind: str) -> None:
    """Covers chunked prompts and decoding, and a sliding window if the model has one."""
    worker = new_worker(kind, prefill_chunk_tokens=16)
    new_run(worker, "run")
    new_run(worker, "untrained")
    train(worker, "run", num_steps=8)
    worker.copy_adapter("run", "sampler")
    (prompt,) = rows(40)
    jobs = [job("long", prompt, "sampler", max_tokens=24), job("short", prompt[:5], "sampler", max_tokens=24)]
    sampled = answers(worker.sample_slice, *jobs)
    for each in jobs:
        (sequence,) = sampled[each.job_id].sequences
        whole = np.concatenate([each.prompt, np.asarray(sequence.tokens, np.int32)])
        (scored,) = logprobs(worker, "run", [whole])
        (untrained,) = logprobs(worker, "untrained", [whole])
        found = np.asarray(sequence.logprobs)
        assert np.abs(found - scored[-len(found) :]).max() < BF16_NATS
        assert np.abs(found - untrained[-len(found) :]).max() > 2 * BF16_NATS


@pytest.mark.parametrize(
    "lengths", [[(16,)] * 8, [(16, 30), (7,), (64, 2, 9), (16,), (1,), (33,), (5, 5), (20,)]], ids=["even", "ragged"]
)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_eight_adapters_in_a_pass_equal_each_alone(
    new_worker: NewWorker, kind: str, lengths: list[tuple[int, ...]]
) -> None:
    worker, run_ids = new_worker(kind), [f"run{number}" for number in range(8)]
    for number, run_id in enumerate(run_ids):
        new_run(worker, run_id, rank=(4, 8, 32)[number % 3], seed=number)
    train(worker, *run_ids)
    data = [rows(*each, seed=100 + number) for number, each in enumerate(lengths)]
    together = run_pass(worker, *(request(*each) for each in zip(run_ids, data, strict=True)))
    answers = worker.apply_steps(tuple(OptimizerStep(each, _ZERO_STEP) for each in run_ids))
    norms = [each["unclipped_grad_l2:mean"] for each in answers if isinstance(each, dict)]
    others = run_pass(worker, *(request(*each) for each in zip(run_ids[1:] + run_ids[:1], data, strict=True)))
    worker.apply_steps(tuple(OptimizerStep(each, _ZERO_STEP) for each in run_ids))
    distances = []
    for run_id, rows_of_run, output, norm, other in zip(run_ids, data, together, norms, others, strict=True):
        (alone,) = run_pass(worker, request(run_id, rows_of_run))
        (stepped,) = worker.apply_steps((OptimizerStep(run_id, _ZERO_STEP),))
        assert isinstance(stepped, dict) and norm == pytest.approx(stepped["unclipped_grad_l2:mean"], rel=0.05)
        for one, same, wrong in zip(output.loss_fn_outputs, alone.loss_fn_outputs, other.loss_fn_outputs, strict=True):
            assert np.abs(np.asarray(one["logprobs"]) - np.asarray(same["logprobs"])).max() < BF16_NATS
            distances.append(np.abs(np.asarray(wrong["logprobs"]) - np.asarray(same["logprobs"])).max())
    assert np.median(distances) > 2 * BF16_NATS


_ZERO_STEP = AdamParams(learning_rate=0.0)


def test_samples_of_eight_adapters_in_a_batch_equal_each_alone(new_worker: NewWorker) -> None:
    worker, run_ids = new_worker(), [f"run{number}" for number in range(8)]
    for number, run_id in enumerate(run_ids):
        new_run(worker, run_id, rank=(4, 32)[number % 2], seed=number)
    train(worker, *run_ids)
    for run_id in run_ids:
        worker.copy_adapter(run_id, f"sampler-{run_id}")
    jobs = [job(each, rows(6 + n)[0], f"sampler-{each}", max_tokens=6 + n) for n, each in enumerate(run_ids)]
    for run_id, answer in answers(worker.sample_slice, *jobs).items():
        (sequence,) = answer.sequences
        prompt = next(each.prompt for each in jobs if each.job_id == run_id)
        (scored,) = logprobs(worker, run_id, [np.concatenate([prompt, np.asarray(sequence.tokens, np.int32)])])
        assert np.abs(np.asarray(sequence.logprobs) - scored[-len(sequence.tokens) :]).max() < BF16_NATS


def test_all_weights_of_a_model_train(new_worker: NewWorker) -> None:
    worker = new_worker()
    worker.create_run(RunSpec("full", FullConfig()))
    data = rows(32)
    before = logprobs(worker, "full", data)[0].sum()
    for _ in range(8):
        run_pass(worker, request("full", data))
        (stepped,) = worker.apply_steps((OptimizerStep("full", AdamParams(learning_rate=1e-3)),))
        assert isinstance(stepped, dict), stepped
    assert logprobs(worker, "full", data)[0].sum() > before + 10


def test_a_pass_that_runs_out_of_memory_is_split(new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator itself refuses an impossible size, twice."""
    worker = new_worker(micro_batch_tokens=1 << 14)
    new_run(worker, "run")
    data = rows(*[32] * 16)
    expected = logprobs(worker, "run", data)
    pack, budgets = runner.pack, []

    def short_of_memory(batches: Any, token_budget: int, *others: Any) -> Any:
        budgets.append(token_budget)
        if len(budgets) <= 2:
            torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
        return pack(batches, token_budget, *others)

    monkeypatch.setattr(runner, "pack", short_of_memory)
    found = logprobs(worker, "run", data)
    assert len(budgets) == 3 and budgets[2] < budgets[1] < budgets[0]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), atol=BF16_NATS)


def test_more_runs_than_slots_take_turns_on_the_device(new_worker: NewWorker) -> None:
    worker, run_ids = new_worker(adapter_slots=2), [f"run{number}" for number in range(5)]
    for number, run_id in enumerate(run_ids):
        new_run(worker, run_id, seed=number)
        train(worker, run_id)
    first = [logprobs(worker, run_id, rows(20)) for run_id in run_ids]
    again = [logprobs(worker, run_id, rows(20)) for run_id in reversed(run_ids)][::-1]
    for number, (one, other) in enumerate(zip(first, again, strict=True)):
        np.testing.assert_array_equal(one[0], other[0])
        assert np.abs(one[0] - first[number - 1][0]).max() > 1e-3


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_recomputed_or_offloaded_activations_give_the_same_gradient(new_worker: NewWorker, activations: str) -> None:
    norms = []
    for choice in ("keep", activations):
        worker = new_worker(activations=choice)
        new_run(worker, "run")
        train(worker, "run")
        for data in (rows(30, 12), rows(30, 13)):
            run_pass(worker, request("run", data))
            (stepped,) = worker.apply_steps((OptimizerStep("run", _ZERO_STEP),))
            assert isinstance(stepped, dict), stepped
            norms.append(stepped["unclipped_grad_l2:mean"])
    assert norms[0] == pytest.approx(norms[2], rel=1e-2) and norms[1] == pytest.approx(norms[3], rel=1e-2)
    assert norms[0] != pytest.approx(norms[1], rel=1e-2)


def test_a_snapshot_holds_the_state_when_it_began(new_worker: NewWorker, tmp_path: Path) -> None:
    worker = new_worker()
    new_run(worker, "run")
    train(worker, "run")
    at_snapshot = logprobs(worker, "run", rows(20))
    directory = tmp_path / "snapshot"
    directory.mkdir()
    worker.begin_snapshot(1, "run", str(directory))
    train(worker, "run", learning_rate=0.1)
    ended: dict[int, Failure | None] = {}
    while not ended:
        ended = worker.ended_snapshots()
    assert ended == {1: None}
    new_run(worker, "restored")
    worker.load_run("restored", str(directory), optimizer=True)
    np.testing.assert_array_equal(logprobs(worker, "restored", rows(20))[0], at_snapshot[0])
    assert np.abs(logprobs(worker, "run", rows(20))[0] - at_snapshot[0]).max() > BF16_NATS


def test_a_base_in_four_bits_trains(new_worker: NewWorker) -> None:
    pytest.importorskip("bitsandbytes")
    worker = new_worker(base_quantization="nf4")
    new_run(worker, "run")
    data = rows(32)
    before = logprobs(worker, "run", data)[0].sum()
    for _ in range(10):
        run_pass(worker, request("run", data))
        worker.apply_steps((OptimizerStep("run", AdamParams(learning_rate=1e-2)),))
    assert logprobs(worker, "run", data)[0].sum() > before + 10


def test_the_cache_and_adapter_slots_are_sized_by_free_memory(
    new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs on the CPU as if the model were on a GPU with this much free memory."""
    worker = new_worker()
    lora, own = worker._models.lora, worker._config
    one = lora.bytes_at_rank(32)
    new_run(worker, "run", rank=32)
    train(worker, "run")
    # Steps of one operation do not allocate every vector, nor the copies that passes of several runs make.
    held = worker.memory()["adapters_on_device"]
    assert max(lora.bytes_at_rank(16), 0.7 * one) < held <= one

    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    sized = {}
    for free in (one, 9 * one, 1000 * one):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 2 * free))
        config = replace(own, prefill_chunk_tokens=0, micro_batch_tokens=5000)
        sized[free // one] = sized_for_device(config, on_gpu, lora, Mesh())
    assert [config.adapter_slots for config in sized.values()] == [1, 3, 64]
    assert sized[9].prefill_chunk_tokens == 4096
    small = replace(own, prefill_chunk_tokens=0, micro_batch_tokens=1000)
    assert sized_for_device(small, on_gpu, lora, Mesh()).prefill_chunk_tokens == 1000
    assert sized_for_device(small, worker._base, lora, Mesh()).prefill_chunk_tokens in (512, 1000)
    given = replace(own, kv_cache_bytes=None)
    assert sized_for_device(given, on_gpu, lora, Mesh()).kv_cache_bytes == 1000 * one // 3
    assert sized[9].kv_cache_bytes == own.kv_cache_bytes, "a configured size is kept"

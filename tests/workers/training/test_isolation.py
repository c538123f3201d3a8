"""Tests that operations of many runs in one pass behave as if each ran alone, even if another one fails."""

import gc
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.lora import LoraLayers, Segment
from trainhouse.workers.losses import LOSSES, LossOutput
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.protocol.calls import Failure, OperationPart, OptimizerStep, RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.resources import machine, memory
from trainhouse.workers.state.trainable import Trainable
from trainhouse.workers.state.vectors import STEP_VECTORS
from trainhouse.workers.worker.worker import Worker

from ..requests import repeatable

VOCAB = 512
GRADIENT_TOLERANCE = 5e-6


@dataclass(frozen=True)
class Tenant:
    """A run with its adapter and its operation in the pass."""

    lora: LoraConfig
    loss_name: str
    lengths: tuple[int, ...]
    forward_only: bool = False
    config: Mapping[str, float] | None = None


TENANTS = {
    "a": Tenant(LoraConfig(rank=4), "cross_entropy", (30, 5, 5)),
    "b": Tenant(LoraConfig(rank=8, alpha=16), "importance_sampling", (12, 40)),
    "c": Tenant(LoraConfig(rank=2, train_mlp=False), "ppo", (21,)),
    "d": Tenant(LoraConfig(rank=16, alpha=8, train_unembed=False), "cispo", (5, 5, 17)),
    "e": Tenant(LoraConfig(rank=4, train_attn=False), "dro", (33, 2)),
    "f": Tenant(LoraConfig(rank=8, train_attn=False, train_mlp=False), "gspo", (9, 9, 26)),
    "g": Tenant(LoraConfig(rank=2, alpha=4), "stable_reinforce", (14,)),
    "h": Tenant(
        LoraConfig(rank=16, train_unembed=False, train_mlp=False), "ppo", (30, 30), config={"clip_high_threshold": 3.0}
    ),
    "i": Tenant(LoraConfig(rank=8), "gspo", (18, 5), forward_only=True),
    "j": Tenant(LoraConfig(rank=4, alpha=64), "cross_entropy", (5, 22), forward_only=True),
}
"""Eight runs with gradients (seven losses, four ranks, all kinds of targets, several alphas), and two forward-only."""


def requests() -> dict[str, ForwardBackwardRequest]:
    random = np.random.default_rng(3)
    return {
        run_id: ForwardBackwardRequest(
            run_id,
            1,
            tuple(some_datum(tenant.loss_name, length, random) for length in tenant.lengths),
            tenant.loss_name,
            tenant.config or {},
            tenant.forward_only,
        )
        for run_id, tenant in TENANTS.items()
    }


def some_datum(loss_name: str, length: int, random: np.random.Generator) -> Datum:
    tokens = random.integers(0, VOCAB, length + 1)
    inputs = {
        "weights": random.normal(size=length),
        "advantages": random.normal(size=length) * (np.arange(length) >= length // 4),
        "logprobs": -6 + 0.3 * random.normal(size=length),
        "sampled_mask": np.ones(length),
    }
    names = LOSSES[loss_name].required or ("weights",)
    given = {name: inputs[name].astype(np.float32) for name in names}
    return Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:]} | given)


@dataclass(frozen=True)
class Result:
    """An operation's result: log-probabilities of all data, and the accumulated gradient (None for a forward)."""

    logprobs: np.ndarray
    metrics: Mapping[str, float]
    gradient: Tensor | None


Results = Mapping[str, Result | Failure]
"""Results by run."""


class TenantRuns:
    """A worker with the tenants' runs and one more, "bad".

    is_dense: the model has no experts, whose batches would depend on other tokens.
    """

    def __init__(self, directory: Path, **options: int) -> None:
        self.worker = Worker(WorkerConfig(ServedModel("tiny", str(directory)), device="cpu", threads=1, **options))
        self.directory, self.is_dense = directory, "moe" not in directory.name
        for run_id, tenant in TENANTS.items():
            self.add(run_id, tenant.lora)
        self.add("bad", LoraConfig(rank=4))

    def add(self, run_id: str, lora: LoraConfig) -> None:
        """Creates a run with weights as after some training: B is not zero."""
        self.worker.create_run(RunSpec(run_id, lora))
        generator = torch.Generator().manual_seed(ord(run_id[0]))
        self.weights(run_id).normal_(std=0.05, generator=generator)

    def weights(self, run_id: str) -> Tensor:
        return self.worker._models.get(run_id).weights

    @contextmanager
    def bad_weights(self, place: int | slice, value: float) -> Iterator[None]:
        """Gives weights of "bad" this value while the context is open."""
        weights = self.weights("bad")
        healthy = weights.clone()
        weights[place] = value
        yield
        assert torch.equal(weights[place], torch.full_like(weights[place], value)) or value != value
        weights.copy_(healthy)

    def accumulator(self, run_id: str) -> Tensor:
        with self.worker._models.resident([run_id], STEP_VECTORS) as (model,):
            return model.gradients.accumulator

    def run(self, *requests: ForwardBackwardRequest) -> dict[str, Result | Failure]:
        """Runs all requests in one pass, then clears the gradients of all runs but "bad"."""
        answers = self.worker.run_pass(tuple(OperationPart(i, request) for i, request in enumerate(requests)))
        results = {}
        for request, answer in zip(requests, answers, strict=True):
            assert answer is not None
            results[request.model_id] = answer if isinstance(answer, Failure) else self._result(request, answer)
        for run_id in TENANTS:
            self.worker.clear_gradients(run_id)
        return results

    def step(self, run_id: str) -> dict[str, float] | Failure:
        (metrics,) = self.worker.apply_steps((OptimizerStep(run_id, AdamParams()),))
        return metrics

    def _result(self, request: ForwardBackwardRequest, answer: ForwardBackwardOutput) -> Result:
        logprobs = np.concatenate([outputs["logprobs"].ravel() for outputs in answer.loss_fn_outputs])
        gradient = None if request.forward_only else self.accumulator(request.model_id).clone()
        return Result(logprobs, repeatable(answer.metrics), gradient)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def tenant_runs(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> TenantRuns:
    return TenantRuns(tiny_models[request.param])


@pytest.fixture(scope="module")
def alone(tenant_runs: TenantRuns) -> Results:
    """Runs each operation in a separate pass."""
    return {run_id: tenant_runs.run(request)[run_id] for run_id, request in requests().items()}


def assert_same(found: Results, expected: Results) -> None:
    for run_id in TENANTS:
        assert_same_result(found[run_id], expected[run_id])


def assert_same_result(one: Result | Failure, other: Result | Failure) -> None:
    """Allows for the rounding of other batch shapes.

    It was measured below 2e-7 of the log-probabilities, and 1.4e-6 of a gradient whose terms cancel out.
    """
    assert isinstance(one, Result) and isinstance(other, Result), (one, other)
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-6)
    assert one.metrics == pytest.approx(other.metrics, rel=1e-6, abs=1e-6)
    if other.gradient is not None:
        assert relative_error(gradient_of(one), other.gradient) < GRADIENT_TOLERANCE


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, relative to the largest element."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("options", [{}, {"micro_batch_tokens": 64, "head_chunk_tokens": 16}, {"adapter_slots": 3}])
def test_each_operation_of_a_mixed_pass_equals_itself_alone(
    options: dict[str, int], tenant_runs: TenantRuns, alone: Results
) -> None:
    assert_same(TenantRuns(tenant_runs.directory, **options).run(*requests().values()), alone)


def test_a_segment_off_by_one_token_is_detected(tenant_runs: TenantRuns, alone: Results) -> None:
    """The control of the comparison: the last token of one run gets its neighbour's adapter."""
    applied = LoraLayers.applied

    def shifted(layers: LoraLayers, segments: Sequence[Segment], *arguments: Any) -> AbstractContextManager[None]:
        first, second, *others = segments
        moved = [replace(first, stop=first.stop - 1), replace(second, start=second.start - 1), *others]
        return applied(layers, moved, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoraLayers, "applied", shifted)
        mixed = tenant_runs.run(*(request for request in requests().values() if not request.forward_only))
    errors = {run_id: relative_error(gradient_of(mixed[run_id]), gradient_of(alone[run_id])) for run_id in mixed}
    assert sorted(errors.values())[-2] > 1e-3
    assert sorted(errors.values())[-3] < GRADIENT_TOLERANCE


def gradient_of(result: Result | Failure) -> Tensor:
    assert isinstance(result, Result) and result.gradient is not None, result
    return result.gradient


def bad_request(length: int = 12, loss_name: str = "cross_entropy", **inputs: np.ndarray) -> ForwardBackwardRequest:
    good = some_datum(loss_name, length, np.random.default_rng(9))
    return ForwardBackwardRequest("bad", 1, (good, Datum(good.tokens, {**good.loss_fn_inputs, **inputs})), loss_name)


def at(position: int, value: float, length: int = 12) -> np.ndarray:
    return np.where(np.arange(length) == position, value, 1.0)


BAD_DATA = {
    "NaN advantages": (bad_request(loss_name="ppo", advantages=at(3, np.nan)), "datum 1: advantages is nan"),
    "NaN logprobs": (bad_request(loss_name="gspo", logprobs=at(9, np.nan)), "datum 1: logprobs is nan"),
    "Inf weights": (bad_request(weights=at(3, np.inf)), "datum 1: weights is inf"),
    "a token outside the vocabulary": (
        bad_request(target_tokens=np.full(12, VOCAB)),
        "datum 1.*outside the vocabulary",
    ),
    "an unknown loss": (replace(bad_request(), loss_fn="mse"), "unknown loss_fn 'mse'"),
    "no data": (replace(bad_request(), data=()), "batch is empty"),
    "a loss that overflows": (bad_request(weights=at(3, 3e38)), "datum 1.*position 3 is not finite"),
    "a loss that overflows over a sequence": (
        bad_request(loss_name="gspo", advantages=at(3, -3e38), logprobs=at(3, -9e3)),
        "not finite",
    ),
    "a gradient that overflows": (
        bad_request(target_tokens=np.arange(12 * 100).reshape(12, 100) % VOCAB, weights=np.full((12, 100), 2.5e37)),
        "gradient of cross_entropy is not finite",
    ),
    "a ratio that overflows": (
        bad_request(loss_name="importance_sampling", logprobs=at(3, -200.0)),
        "datum 1.*position 3 is not finite",
    ),
}


def explodes(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossOutput:
    raise ArithmeticError("boom")


def allocates_too_much(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossOutput:
    return LossOutput(logprobs + torch.empty(1 << 50, dtype=torch.uint8).sum())


BROKEN_LOSSES = {
    "an unexpected error": (explodes, "ArithmeticError: boom"),
    "out of memory": (
        allocates_too_much,
        "out of memory: a micro-batch of 12 tokens .*is 4096; datum 0 alone has 12.*cpu has .* free",
    ),
}

BAD_WEIGHTS = {
    "NaN in the first A": (0, float("nan")),
    "NaN in the last B": (-1, float("nan")),
    "Inf in the first A": (0, float("inf")),
    "Inf in the last B": (-1, float("-inf")),
    "products that overflow": (slice(None), 1e25),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_fail_only_their_operation(case: str, tenant_runs: TenantRuns, alone: Results) -> None:
    bad, message = BAD_DATA[case]
    assert_fails_alone(tenant_runs, alone, bad, message, "user")


@pytest.mark.parametrize("case", BROKEN_LOSSES)
def test_unexpected_errors_fail_only_their_operation(
    case: str, tenant_runs: TenantRuns, alone: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, message = BROKEN_LOSSES[case]
    monkeypatch.setitem(LOSSES, "broken", replace(LOSSES["cross_entropy"], function=function))
    assert_fails_alone(tenant_runs, alone, replace(bad_request(), loss_fn="broken"), message, "server")


def assert_fails_alone(
    tenant_runs: TenantRuns, alone: Results, bad: ForwardBackwardRequest, message: str, category: str
) -> None:
    """Asserts that only the bad operation fails; its run keeps weights and gradients, and refuses the next step."""
    tenant_runs.worker.run_pass((OperationPart(0, bad_request()),))
    weights, accumulated = tenant_runs.weights("bad").clone(), tenant_runs.accumulator("bad").clone()
    good = list(requests().values())
    found = tenant_runs.run(*good[:4], bad, *good[4:])
    failure = found["bad"]
    assert isinstance(failure, Failure)
    assert re.search(message, failure.message), failure.message
    assert failure.category == category
    assert_same(found, alone)
    assert torch.equal(tenant_runs.accumulator("bad"), accumulated)
    step = tenant_runs.step("bad")
    assert isinstance(step, Failure)
    assert failure.message in step.message
    assert torch.equal(tenant_runs.weights("bad"), weights)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_diverged_weights_fail_only_their_run(
    case: str, forward_only: bool, tenant_runs: TenantRuns, alone: Results
) -> None:
    with tenant_runs.bad_weights(*BAD_WEIGHTS[case]):
        bad = replace(bad_request(), forward_only=forward_only)
        found = tenant_runs.run(*requests().values(), bad)
        step = tenant_runs.step("bad")
    failure = found["bad"]
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert "diverged" in failure.message and "earlier checkpoint" in failure.message
    assert_same(found, alone)
    assert isinstance(step, Failure)


@pytest.mark.parametrize("repeated", [1, 4, 20])
@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_no_kernel_leaks_values_between_runs(
    case: str, repeated: int, tenant_runs: TenantRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check, such weights pass through all kernels; the other runs' results must not change by a bit.

    repeated: multiplies the data, because kernels differ by the number of rows.
    """
    monkeypatch.setattr(Trainable, "has_finite_weights", lambda _: True)
    *good, bad = (replace(each, data=each.data * repeated) for each in [*requests().values(), bad_request()])
    with_healthy = tenant_runs.run(*good[:4], bad, *good[4:])
    assert isinstance(with_healthy["bad"], Result)
    with tenant_runs.bad_weights(*BAD_WEIGHTS[case]):
        found = tenant_runs.run(*good[:4], bad, *good[4:])
    tenant_runs.worker.clear_gradients("bad")
    assert isinstance(found["bad"], Failure)
    if tenant_runs.is_dense:
        assert_equal(found, with_healthy)
    else:
        assert_same(found, with_healthy)


def assert_equal(found: Results, expected: Results) -> None:
    for run_id in TENANTS:
        one, other = found[run_id], expected[run_id]
        assert isinstance(one, Result) and isinstance(other, Result), (one, other)
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert one.metrics == other.metrics
        assert other.gradient is None or torch.equal(gradient_of(one), other.gradient)


def test_a_failed_operation_does_not_block_other_runs_steps(tenant_runs: TenantRuns) -> None:
    bad, _ = BAD_DATA["a loss that overflows"]
    before = {run_id: tenant_runs.weights(run_id).clone() for run_id in TENANTS}
    parts = [OperationPart(i, request) for i, request in enumerate([bad, *requests().values()])]
    tenant_runs.worker.run_pass(tuple(parts))
    trained = [run_id for run_id, tenant in TENANTS.items() if not tenant.forward_only]
    metrics = tenant_runs.worker.apply_steps(tuple(OptimizerStep(run_id, AdamParams()) for run_id in [*trained, "bad"]))
    assert [isinstance(each, Failure) for each in metrics] == [False] * len(trained) + [True]
    for run_id, weights in before.items():
        assert torch.equal(tenant_runs.weights(run_id), weights) == (run_id not in trained)
        tenant_runs.weights(run_id).copy_(weights)


@pytest.mark.parametrize("forward_only", [False, True])
def test_the_base_stays_frozen_and_a_forward_keeps_no_graph(forward_only: bool, tenant_runs: TenantRuns) -> None:
    chosen = [request for request in requests().values() if request.forward_only == forward_only]
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        tenant_runs.run(*chosen)
    assert bool(saved) == (not forward_only)
    parameters = list(tenant_runs.worker._base.model.parameters())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in parameters)


def takes_megabytes(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossOutput:
    torch.empty(len(logprobs) * 1_300_000, dtype=torch.uint8)
    return LOSSES["cross_entropy"].function(logprobs, inputs, config)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is not bounded")
def test_a_pass_that_runs_out_of_memory_is_split(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "hungry", replace(LOSSES["cross_entropy"], function=takes_megabytes))
    tenant_runs = TenantRuns(tiny_models["llama"], head_chunk_tokens=4096)
    random = np.random.default_rng(0)
    lengths = {"a": [50] * 20, "b": [8], "c": [1000]}
    hungry = [
        ForwardBackwardRequest(run_id, 1, tuple(some_datum("cross_entropy", n, random) for n in own), "hungry")
        for run_id, own in lengths.items()
    ]
    hidden_states, sizes = BaseModel.hidden_states, []

    def recorded(base: BaseModel, tokens: Tensor, *others: Any, **options: Any) -> Tensor:
        sizes.append(len(tokens))
        return hidden_states(base, tokens, *others, **options)

    monkeypatch.setattr(BaseModel, "hidden_states", recorded)
    # Otherwise memory of earlier tests would be freed in the pass, and be room for it.
    gc.collect()
    memory.release_freed_memory(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "available_bytes", lambda: 800_000_000)
        # Earlier tests' freed memory is fragmented and would count as used.
        patch.setattr(memory, "free_bytes", lambda: 0)
        found = tenant_runs.run(*hungry)
    assert isinstance(found["a"], Result) and isinstance(found["b"], Result)
    failure = found["c"]
    assert isinstance(failure, Failure)
    assert re.search("micro-batch of 1000 tokens does not fit .*cpu has 800 MB", failure.message)
    assert sizes == [2008, 1000, 1000, 500, 500, 8]
    assert_same_result(found["a"], tenant_runs.run(replace(hungry[0], loss_fn="cross_entropy"))["a"])

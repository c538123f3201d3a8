"""Tests passes of policies: the same sums for any split, all or nothing, and equality with plain transformers."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.batch.validated import ModelLimits
from trainhouse.workers.lora import Adapter, LoraLayers
from trainhouse.workers.losses import LOSSES
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.protocol.calls import Failure, OperationPart, PartAnswer
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.registry.model_registry import ModelRegistry
from trainhouse.workers.training.pass_runner import PassRunner
from transformers import AutoModelForCausalLM

from ...tiny import KINDS
from ..adapted import SIZES, create_adapter

LENGTHS = (5, 30, 5, 12, 1, 17)


class Bench:
    """A tiny model with one run's adapter, whose B is not zero."""

    def __init__(self, directory: Path, **options: int | str) -> None:
        self.config = WorkerConfig(ServedModel("tiny", str(directory)), **(SIZES | options))
        self.base = BaseModel(self.config)
        self.models = ModelRegistry(self.base, LoraLayers(self.base, max_rank=8))
        self.adapter = self.new_adapter("run")

    def new_adapter(self, run_id: str) -> Adapter:
        adapter = create_adapter(self.models, run_id, LoraConfig(rank=4, seed=1))
        adapter.weights.normal_(std=0.02, generator=torch.Generator().manual_seed(7))
        return adapter

    def pass_runner(self, **options: int) -> PassRunner:
        return PassRunner(self.base, self.models, ModelLimits(512, 1024), replace(self.config, **options))

    def gradient(self, *requests: ForwardBackwardRequest, **options: int) -> Tensor:
        """Returns the gradient that the requests accumulate."""
        self.adapter.gradients.clear_window()
        for request in requests:
            expect_output(run(self.pass_runner(**options), request))
        return self.adapter.gradients.accumulator.clone()


@pytest.fixture(scope="module")
def module_bench(tiny_models: dict[str, Path]) -> Bench:
    return Bench(tiny_models["qwen3"])


@pytest.fixture
def bench(module_bench: Bench) -> Iterator[Bench]:
    yield module_bench
    module_bench.adapter.gradients.clear_window()


def run(pass_runner: PassRunner, request: ForwardBackwardRequest) -> PartAnswer:
    """Runs the request alone in a pass."""
    (answer,) = pass_runner.run_pass((OperationPart(0, request),))
    return answer


def expect_output(result: PartAnswer) -> ForwardBackwardOutput:
    assert isinstance(result, ForwardBackwardOutput), result
    return result


def expect_failure(result: PartAnswer) -> Failure:
    assert isinstance(result, Failure)
    return result


def some_data(loss_name: str, lengths: tuple[int, ...] = LENGTHS) -> tuple[Datum, ...]:
    random = np.random.default_rng(5)
    return tuple(some_datum(loss_name, length, random) for length in lengths)


def some_datum(loss_name: str, length: int, random: np.random.Generator) -> Datum:
    tokens = random.integers(0, 512, length + 1)
    inputs = {
        "weights": random.normal(size=length),
        "advantages": random.normal(size=length) * (np.arange(length) >= length // 3),
        "logprobs": -6 + 0.3 * random.normal(size=length),
        "sampled_mask": np.ones(length),
    }
    loss = LOSSES[loss_name]
    names = (*loss.required, *(("weights",) if "weights" in loss.optional else ()))
    given = {name: inputs[name].astype(np.float32) for name in names}
    return Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:]} | given)


def request(data: tuple[Datum, ...], loss_name: str = "cross_entropy", **fields: object) -> ForwardBackwardRequest:
    return replace(ForwardBackwardRequest("run", 1, data, loss_name), **fields)


def with_inputs(datum: Datum, **inputs: np.ndarray) -> Datum:
    return Datum(datum.tokens, {**datum.loss_fn_inputs, **inputs})


def assert_same_gradient(found: Tensor, expected: Tensor) -> None:
    """Allows for float32 sums in another order, measured below 6e-7 of the norm at these sizes."""
    assert float((found - expected).norm() / expected.norm()) < 5e-6


@pytest.mark.parametrize("loss_name", LOSSES)
def test_any_split_of_a_batch_accumulates_the_same_gradient(loss_name: str, bench: Bench) -> None:
    data = some_data(loss_name)
    whole = bench.gradient(request(data, loss_name))
    splits = {
        "calls": bench.gradient(*(request((datum,), loss_name) for datum in data)),
        "micro-batches": bench.gradient(request(data, loss_name), micro_batch_tokens=20),
        "one sequence a micro-batch": bench.gradient(request(data, loss_name), micro_batch_tokens=1),
        "chunks of the head": bench.gradient(request(data, loss_name), head_chunk_tokens=7),
        "order": bench.gradient(request(data[::-1], loss_name)),
    }
    for gradient in splits.values():
        assert_same_gradient(gradient, whole)
    mean_of_calls = splits["calls"] / len(data)
    with pytest.raises(AssertionError):
        assert_same_gradient(mean_of_calls, whole)
    with pytest.raises(AssertionError):
        assert_same_gradient(bench.gradient(request(data[1:], loss_name)), whole)


def reference_logprobs(directory: Path, datum: Datum) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0]
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
    return torch.log_softmax(logits.double(), dim=-1).gather(1, targets[:, None]).squeeze(1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_equals_that_of_transformers(kind: str, tiny_models: dict[str, Path]) -> None:
    bench = Bench(tiny_models[kind])
    bench.adapter.initialize()
    data = some_data("cross_entropy")
    output = expect_output(run(bench.pass_runner(micro_batch_tokens=40, head_chunk_tokens=8), request(data)))
    references = [reference_logprobs(tiny_models[kind], datum) for datum in data]
    for outputs, reference in zip(output.loss_fn_outputs, references, strict=True):
        np.testing.assert_allclose(outputs["logprobs"], reference.numpy(), rtol=1e-5, atol=1e-5)
    weights = torch.cat([torch.from_numpy(datum.loss_fn_inputs["weights"]) for datum in data])
    losses = -weights * torch.cat(references)
    # Weights of both signs cancel out, so rounding is relative to the sum of absolute values.
    rounding = 1e-7 * float(losses.abs().sum())
    assert output.metrics["loss:sum"] == pytest.approx(float(losses.sum()), abs=rounding)
    assert output.metrics["loss:sum"] != pytest.approx(float(losses.sum()) + 10 * rounding, abs=rounding)
    assert output.metrics["num_tokens:sum"] == sum(LENGTHS)
    assert bench.adapter.gradients.accumulator.any()


def test_at_learning_rate_zero_ten_passes_are_bit_identical(bench: Bench) -> None:
    data = some_data("ppo")
    gradients, outputs = [], []
    for _ in range(10):
        bench.adapter.gradients.clear_window()
        outputs.append(expect_output(run(bench.pass_runner(micro_batch_tokens=40), request(data, "ppo"))))
        gradients.append(bench.adapter.gradients.accumulator.clone())
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    assert all(output.metrics == outputs[0].metrics for output in outputs)
    for output in outputs:
        for found, first in zip(output.loss_fn_outputs, outputs[0].loss_fn_outputs, strict=True):
            assert found["logprobs"].tobytes() == first["logprobs"].tobytes()


def test_every_metric_has_one_colon_and_means_are_over_counted_positions(bench: Bench) -> None:
    data = some_data("ppo")
    metrics = expect_output(run(bench.pass_runner(head_chunk_tokens=7), request(data, "ppo"))).metrics
    assert set(metrics) == {"loss:sum", "num_tokens:sum", "model_flops:sum", "kl:mean", "clip_fraction:mean"}
    counted = sum(int(np.count_nonzero(datum.loss_fn_inputs["advantages"])) for datum in data)
    assert metrics["num_tokens:sum"] == counted
    assert bench.adapter.gradients.window.weight_sum == counted
    assert 0 < metrics["clip_fraction:mean"] < 1


def test_forward_only_gives_the_outputs_and_leaves_the_gradients(bench: Bench) -> None:
    data = some_data("cross_entropy")
    trained = expect_output(run(bench.pass_runner(), request(data)))
    accumulated, operations = bench.adapter.gradients.accumulator.clone(), bench.adapter.gradients.window.num_operations
    output = expect_output(run(bench.pass_runner(), request(data, forward_only=True)))
    for own, of_training in zip(output.loss_fn_outputs, trained.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(own["logprobs"], of_training["logprobs"], rtol=1e-6)
    # The weights have both signs, so the sum is smaller than its terms and their rounding errors.
    terms = np.concatenate(
        [
            datum.loss_fn_inputs["weights"] * own["logprobs"]
            for datum, own in zip(data, output.loss_fn_outputs, strict=True)
        ]
    )
    assert output.metrics["loss:sum"] == pytest.approx(
        trained.metrics["loss:sum"], abs=1e-7 * float(np.abs(terms).sum())
    )
    assert torch.equal(bench.adapter.gradients.accumulator, accumulated)
    assert bench.adapter.gradients.window.num_operations == operations


def test_loss_weight_scales_the_loss_and_the_gradient(bench: Bench) -> None:
    data = some_data("ppo")
    gradient = bench.gradient(request(data, "ppo"))
    assert_same_gradient(bench.gradient(request(data, "ppo", loss_weight=0.25)), 0.25 * gradient)
    whole = expect_output(run(bench.pass_runner(), request(data, "ppo"))).metrics["loss:sum"]
    quarter = expect_output(run(bench.pass_runner(), request(data, "ppo", loss_weight=0.25))).metrics["loss:sum"]
    assert quarter == pytest.approx(0.25 * whole)


FAILURES = {
    "NaN input": (
        {"weights": np.where(np.arange(12) == 1, np.nan, 1.0)},
        ["datum 2", "weights is nan", "position 1"],
    ),
    "loss that overflows": (
        {"weights": np.where(np.arange(12) == 7, 3e38, 1.0)},
        ["datum 2", "position 7", "log-probability is -"],
    ),
    "gradient that overflows": (
        {"target_tokens": np.arange(12 * 100).reshape(12, 100) % 512, "weights": np.full((12, 100), 2.5e37)},
        ["gradient of cross_entropy is not finite"],
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_an_operation_that_fails_contributes_nothing(case: str, bench: Bench) -> None:
    """The operation fails after others of its micro-batches have succeeded."""
    inputs, fragments = FAILURES[case]
    good = some_data("cross_entropy", (30, 20, 12))
    bad = (*good[:2], with_inputs(good[2], **inputs))
    before = bench.gradient(request(good))
    failure = expect_failure(run(bench.pass_runner(micro_batch_tokens=30), request(bad)))
    assert failure.category == "user"
    assert all(fragment in failure.message for fragment in fragments), failure.message
    assert torch.equal(bench.adapter.gradients.accumulator, before)
    assert bench.adapter.gradients.window.num_operations == 1
    assert bench.adapter.gradients.window.refused == failure.message
    assert torch.equal(bench.gradient(request(good)), before)


def test_a_failed_forward_does_not_refuse_the_window(bench: Bench) -> None:
    bad = with_inputs(some_data("cross_entropy", (3,))[0], weights=np.array([1.0, np.nan, 1.0]))
    expect_failure(run(bench.pass_runner(), request((bad,), forward_only=True)))
    assert bench.adapter.gradients.window.refused is None


def test_a_run_whose_weights_are_nan_fails_alone(bench: Bench) -> None:
    before = bench.gradient(request(some_data("cross_entropy")))
    diverged = bench.new_adapter("diverged")
    diverged.weights[10] = float("nan")
    failure = expect_failure(run(bench.pass_runner(), request(some_data("cross_entropy"), model_id="diverged")))
    bench.models.drop("diverged")
    assert "not finite" in failure.message
    assert "earlier checkpoint" in failure.message
    assert torch.equal(bench.gradient(request(some_data("cross_entropy"))), before)


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_micro_batch_is_freed_before_the_next_begins(forward_only: bool, bench: Bench) -> None:
    """A pass must need only the memory of its largest micro-batch."""
    hidden_states, created, alive = bench.base.hidden_states, [], []

    def recorded(*arguments: Any, **options: Any) -> Tensor:
        alive.append(sum(each() is not None for each in created))
        hidden = hidden_states(*arguments, **options)
        created.append(weakref.ref(hidden))
        return hidden

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.base, "hidden_states", recorded)
        everything = request(some_data("ppo"), "ppo", forward_only=forward_only)
        expect_output(run(bench.pass_runner(micro_batch_tokens=20), everything))
    assert alive == [0] * len(created)
    assert len(created) > 3


def garbage_without_advantage(datum: Datum, garbage: float) -> np.ndarray:
    """Returns the sampler's log-probabilities with garbage wherever the advantage is 0."""
    inputs = datum.loss_fn_inputs
    return np.where(inputs["advantages"] == 0, garbage, inputs["logprobs"])


def test_positions_without_advantage_ignore_the_samplers_logprobs(bench: Bench) -> None:
    data = some_data("ppo")
    expected = bench.gradient(request(data, "ppo"))
    for garbage in (-np.inf, np.nan, 1e30):
        broken = tuple(with_inputs(datum, logprobs=garbage_without_advantage(datum, garbage)) for datum in data)
        assert torch.equal(bench.gradient(request(broken, "ppo")), expected)


def test_data_with_several_targets_keep_their_shapes(bench: Bench) -> None:
    one, two = some_data("cross_entropy", (4, 6))
    targets = np.stack([two.loss_fn_inputs["target_tokens"], np.full(6, 9)], axis=1)
    both = Datum(two.tokens, {"target_tokens": targets, "weights": np.ones((6, 2), np.float32)})
    output = expect_output(run(bench.pass_runner(), request((one, both))))
    assert [outputs["logprobs"].shape for outputs in output.loss_fn_outputs] == [(4,), (6, 2)]
    single = expect_output(run(bench.pass_runner(), request((two,)))).loss_fn_outputs[0]["logprobs"]
    np.testing.assert_allclose(output.loss_fn_outputs[1]["logprobs"][:, 0], single, rtol=1e-5)


def test_an_adapter_of_only_the_head_trains(bench: Bench) -> None:
    lora = LoraConfig(rank=4, seed=1, train_attn=False, train_mlp=False)
    adapter = create_adapter(bench.models, "head", lora)
    expect_output(run(bench.pass_runner(), request(some_data("cross_entropy"), model_id="head")))
    bench.models.drop("head")
    assert adapter.gradients.accumulator.any()


def test_an_unknown_run_fails(bench: Bench) -> None:
    failure = expect_failure(run(bench.pass_runner(), request(some_data("cross_entropy"), model_id="gone")))
    assert failure.category == "server"
    assert "gone" in failure.message

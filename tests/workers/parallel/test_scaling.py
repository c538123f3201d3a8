"""Scaling a gradient at the step equals scaling the loss, on one rank and several, by large and small factors."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import ParallelSpec

from ...tiny import tiny_model
from .training import Layout, layout, reinforced, supervised

# Without momentum: AdamW's first moment is then the gradient of the step.
ADAM = AdamParams(learning_rate=1e-3, beta1=0.0)
LENGTHS = (9, 30, 17, 4, 12)
SCALES = (0.25, 1 / 72, 1e-6, 3e4)
REQUESTS = {
    "cross_entropy": supervised("run", 1, *LENGTHS),
    "ppo": reinforced("run", 1, *LENGTHS),
    "gspo": reinforced("run", 1, *LENGTHS, loss_fn="gspo"),
}
# Relative to the gradient's norm. Measured: at most 1.3e-6, and on a bfloat16 base 1.1e-2 (docs/rest.md), half of
# the difference between its gradient and that of float32.
FLOAT32, BFLOAT16 = 2e-6, 1.5e-2

Gradient = Mapping[str, np.ndarray]


class Trainer:
    """Computes gradients of any requests, always for the same adapter, whose B is not zero."""

    def __init__(self, where: Layout) -> None:
        self._where = where
        where.call("create_run", RunSpec("run", LoraConfig(rank=4, seed=1)))
        self.step(supervised("run", 0, 8, vocab_size=64))
        self._start = where.saved("run")

    def gradient(self, *requests: ForwardBackwardRequest, scale: float | Literal["mean"] | None = None) -> Gradient:
        """Returns the gradient that the optimizer gets in a step of all requests."""
        self._where.call("load_run", "run", str(self._start), False)
        self.step(*requests, scale=scale)
        moments = load_file(self._where.saved("run") / "optimizer.safetensors")
        return {name: values for name, values in moments.items() if name.startswith("exp_avg.")}

    def step(self, *requests: ForwardBackwardRequest, scale: float | Literal["mean"] | None = None) -> None:
        for request in requests:
            (output,) = self._where.run_pass(request)
            assert isinstance(output, ForwardBackwardOutput), output
        (metrics,) = self._where.call("apply_steps", (OptimizerStep("run", ADAM, scale),))
        assert isinstance(metrics, dict), metrics

    def steps_of_weights(self) -> np.ndarray:
        """Returns how far the last step moved each weight."""
        before, after = (
            load_file(directory / "adapter_model.safetensors") for directory in (self._start, self._where.saved("run"))
        )
        return np.concatenate([np.abs(after[name] - before[name]).ravel() for name in before])


def full(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.fixture(
    scope="module",
    params=[
        ("single", "float32"),
        ("single", "bfloat16"),
        *(full((spec, dtype)) for spec in ("fsdp=2", "tp=2") for dtype in ("float32", "bfloat16")),
    ],
    ids="-".join,
)
def layout_and_dtype(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def tolerance(layout_and_dtype: tuple[str, str]) -> float:
    return FLOAT32 if layout_and_dtype[1] == "float32" else BFLOAT16


@pytest.fixture(scope="module")
def trainer(
    layout_and_dtype: tuple[str, str], tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainer]:
    spec, dtype = layout_and_dtype
    with layout(tiny_models["qwen3"], ParallelSpec.parse(spec), tmp_path_factory.mktemp("runs"), dtype=dtype) as where:
        yield Trainer(where)


@pytest.mark.parametrize("loss", REQUESTS)
def test_scaled_step_equals_a_scaled_loss(loss: str, trainer: Trainer, tolerance: float) -> None:
    """A power of two gives exactly the same, because it does not affect rounding."""
    request = REQUESTS[loss]
    plain = trainer.gradient(request)
    errors = {}
    for scale in SCALES:
        step_gradient = trainer.gradient(request, scale=scale)
        loss_gradient = trainer.gradient(replace(request, loss_weight=scale))
        errors[scale] = relative_error(loss_gradient, step_gradient)
        assert relative_error(step_gradient, {name: scale * values for name, values in plain.items()}) <= FLOAT32
        assert (
            relative_error(loss_gradient, {name: 1.02 * values for name, values in step_gradient.items()}) > tolerance
        )
    print(f"{loss}: {', '.join(f'{scale:.3g}: {error:.1e}' for scale, error in errors.items())}")
    assert errors.pop(0.25) == 0.0
    assert max(errors.values()) <= tolerance


def test_mini_batches_weighted_by_size_equal_the_joined_batch(trainer: Trainer, tolerance: float) -> None:
    first, second = unit_weights((40, 21, 3)), unit_weights((5, 9), seed=1)
    joined = replace(first, data=first.data + second.data)
    wanted = trainer.gradient(joined, scale="mean")
    parts = [mean_of(first), mean_of(second)]
    shares = [num_tokens(each) / num_tokens(joined) for each in (first, second)]
    by_size = [replace(part, loss_weight=share) for part, share in zip(parts, shares, strict=True)]
    assert relative_error(trainer.gradient(*by_size), wanted) <= tolerance
    assert relative_error(trainer.gradient(first, second, scale="mean"), wanted) <= tolerance
    # Here the smaller one would count as much as the larger.
    assert relative_error(trainer.gradient(*parts, scale=0.5), wanted) > 10 * tolerance


NUM_TOKENS = 1_000_000
BATCH_TOKENS = 20_000


@pytest.mark.parametrize(
    ("spec", "dtype", "num_tokens"),
    [
        ("single", "float32", 2 * BATCH_TOKENS),
        full("single", "bfloat16", 2 * BATCH_TOKENS),
        *(full(spec, "float32", NUM_TOKENS) for spec in ("single", "fsdp=2", "tp=2")),
    ],
)
def test_extreme_advantages_do_not_overflow_or_vanish(spec: str, dtype: str, num_tokens: int, tmp_path: Path) -> None:
    """Sums of large advantages are scaled at the step, and losses of small ones before they are summed."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    model = tiny_model("qwen3", tmp_path / "model", **small)
    tolerance = 1e-5 if dtype == "float32" else BFLOAT16
    options = {"dtype": dtype, "micro_batch_tokens": BATCH_TOKENS, "head_chunk_tokens": BATCH_TOKENS}
    with layout(model, ParallelSpec.parse(spec), tmp_path / "runs", **options) as where:
        trainer = Trainer(where)
        times = num_tokens // BATCH_TOKENS
        wanted = trainer.gradient(with_advantage(1.0), scale="mean")
        large, small = with_advantage(1e4), replace(with_advantage(1e-6), loss_weight=1 / num_tokens)
        for advantage, batch, scale in ((1e4, large, "mean"), (1e-6, small, None)):
            found = trainer.gradient(*[batch] * times, scale=scale)
            # The first step of AdamW has the size of the learning rate, for any size of the gradient.
            assert np.quantile(trainer.steps_of_weights(), [0.1, 1.0]) == pytest.approx(ADAM.learning_rate, rel=0.1)
            assert relative_error(found, {name: advantage * values for name, values in wanted.items()}) <= tolerance


def relative_error(found: Gradient, wanted: Gradient) -> float:
    assert found.keys() == wanted.keys()
    ours, theirs = (
        np.concatenate([each[name].ravel().astype(np.float64) for name in wanted]) for each in (found, wanted)
    )
    assert theirs.any()
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def unit_weights(lengths: tuple[int, ...], seed: int = 0) -> ForwardBackwardRequest:
    """Gives each token weight 1."""
    request = supervised("run", seed, *lengths)
    ones = [{**datum.loss_fn_inputs, "weights": np.ones(len(datum.tokens), np.float32)} for datum in request.data]
    return replace(request, data=tuple(map(Datum, (datum.tokens for datum in request.data), ones)))


def num_tokens(request: ForwardBackwardRequest) -> int:
    return sum(len(datum.tokens) for datum in request.data)


def mean_of(request: ForwardBackwardRequest) -> ForwardBackwardRequest:
    """Makes the loss a mean over tokens."""
    weight = np.float32(1 / num_tokens(request))
    data = [Datum(each.tokens, {**each.loss_fn_inputs, "weights": weight * each.loss_fn_inputs["weights"]})
            for each in request.data]  # fmt: skip
    return replace(request, data=tuple(data))


def with_advantage(advantage: float) -> ForwardBackwardRequest:
    """Sequences of 100 tokens below 64, as if sampled with about their probabilities under the model."""
    random = np.random.default_rng(0)
    data = []
    for tokens in random.integers(3, 64, (BATCH_TOKENS // 100, 101)):
        inputs = {"logprobs": random.uniform(-5, -4, 100), "advantages": np.full(100, advantage)}
        inputs = {name: values.astype(np.float32) for name, values in inputs.items()}
        data.append(Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:], **inputs}))
    return ForwardBackwardRequest("run", 1, tuple(data), "importance_sampling")

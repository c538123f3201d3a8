"""Tests the optimizer step against torch's AdamW, and the windows that it refuses."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import AdamParams
from trainhouse.workers.lora import Adapter, LoraLayers
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.protocol.calls import Failure, OptimizerStep
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.state.optim import apply_steps, global_norms

from ..adapted import (
    Adapted,
    copy_adapter,
    load_in_peft,
    new_adapter,
    peft_logits,
    peft_parameters,
    probe,
    relative_error,
    sequences,
)


@pytest.fixture
def adapter(tiny_models: dict[str, Path]) -> Adapter:
    return Adapted(tiny_models["llama"]).create("run")


def accumulate(adapter: Adapter, gradient: torch.Tensor, **window: float) -> None:
    adapter.gradients.begin_operation()
    adapter.gradients.scratch.copy_(gradient)
    adapter.gradients.commit(
        num_tokens=int(window.get("num_tokens", 1)),
        weight_sum=window.get("weight_sum", 1.0),
        losses={"loss:sum": window.get("loss", 0.0)},
    )


def step(scale: float | Literal["mean"] | None = None, **params: float) -> OptimizerStep:
    return OptimizerStep("run", AdamParams.model_validate(params), scale)


def apply_step(adapter: Adapter, step: OptimizerStep) -> dict[str, float]:
    (metrics,) = apply_steps([adapter], [step])
    assert isinstance(metrics, dict), metrics
    return metrics


def refusal(adapter: Adapter, step: OptimizerStep) -> str:
    (failure,) = apply_steps([adapter], [step])
    assert isinstance(failure, Failure) and failure.category == "user"
    return failure.message


def random_gradient(adapter: Adapter, seed: int = 0) -> torch.Tensor:
    return torch.randn(adapter.weights.shape, generator=torch.Generator().manual_seed(seed))


STEPS = [
    {"learning_rate": 1e-2, "weight_decay": 0.1, "grad_clip_norm": 1.0},
    {"learning_rate": 2e-2, "weight_decay": 0.1, "grad_clip_norm": 1.0},
    {"learning_rate": 1e-3, "weight_decay": 0.0, "grad_clip_norm": 0.0},
    {"learning_rate": 5e-3, "weight_decay": 0.3, "grad_clip_norm": 1e6},
    {"learning_rate": 1e-2, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6},
]


def torch_adamw(adapter: Adapter, gradients: list[torch.Tensor], steps: list[dict[str, float]]) -> torch.Tensor:
    parameter = torch.nn.Parameter(adapter.weights.clone())
    optimizer = torch.optim.AdamW([parameter])
    for gradient, fields in zip(gradients, steps, strict=True):
        params = AdamParams.model_validate(fields)
        parameter.grad = gradient.clone()
        if params.grad_clip_norm:
            clip_grad_norm_([parameter], params.grad_clip_norm)
        optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        optimizer.step()
    return parameter.detach()


def test_five_steps_of_changing_parameters_equal_torchs_adamw(adapter: Adapter) -> None:
    gradients = [random_gradient(adapter, seed) for seed in range(len(STEPS))]
    wanted = torch_adamw(adapter, gradients, STEPS)
    without_decay = torch_adamw(adapter, gradients, [fields | {"weight_decay": 0.0} for fields in STEPS])
    for gradient, fields in zip(gradients, STEPS, strict=True):
        accumulate(adapter, gradient)
        apply_step(adapter, step(**fields))
    assert relative_error(adapter.weights, wanted) < 1e-6
    assert relative_error(adapter.weights, without_decay) > 1e-4


def test_a_lora_step_equals_peft_and_torch(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["qwen3_tied"])
    adapter = adapted.create("run")
    before = adapter.weights.clone()
    tuned = load_in_peft(adapted.directory, adapter)
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    for _ in range(2):
        logits, wanted = adapted.logits(sequences(), adapter), peft_logits(tuned, sequences())
        adapter.gradients.begin_operation()
        (logits * probe(logits)).sum().backward()
        adapter.gradients.commit()
        optimizer.zero_grad()
        (wanted * probe(wanted)).sum().backward()
        apply_step(adapter, step(learning_rate=1e-3, eps=1e-8, weight_decay=0.1))
        optimizer.step()

    named = adapter.layout.named_views(adapter.weights)
    for name, parameter in peft_parameters(tuned).items():
        assert relative_error(named[name], parameter) < 1e-5, name
    assert relative_error(adapter.weights, before) > 1e-3


def test_a_step_returns_its_metrics_and_consumes_the_window(adapter: Adapter) -> None:
    accumulate(adapter, random_gradient(adapter), num_tokens=5, loss=2.0)
    accumulate(adapter, random_gradient(adapter), num_tokens=3, loss=0.5)
    norm = float(2 * random_gradient(adapter).norm())
    metrics = apply_step(adapter, step(learning_rate=1e-3, grad_clip_norm=norm / 2))
    assert metrics.pop("unclipped_grad_l2:mean") == pytest.approx(norm, rel=1e-5)
    assert metrics == {"loss:sum": 2.5, "window_tokens:sum": 8.0, "grad_clipped:mean": 1.0, "optimizer_step:last": 1.0}
    assert adapter.gradients.window.num_operations == 0
    assert not adapter.gradients.accumulator.any()


@pytest.mark.parametrize("max_norm, clipped", [(0.0, 0.0), (1e9, 0.0), (1e-3, 1.0)])
def test_grad_clipped_reports_whether_gradients_were_clipped(adapter: Adapter, max_norm: float, clipped: float) -> None:
    accumulate(adapter, random_gradient(adapter))
    assert apply_step(adapter, step(grad_clip_norm=max_norm))["grad_clipped:mean"] == clipped


@pytest.mark.parametrize("size", [10, 1 << 14, 5_000_011])
def test_the_norm_of_a_large_adapter_is_exact(size: int) -> None:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(1))
    exact = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    norm, norm_of_more = global_norms([gradient, gradient * (1 + 1e-5)])
    assert norm == pytest.approx(exact, rel=1e-6)
    assert norm_of_more != pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("scale, factor", [(None, 1.0), ("mean", 0.25), (0.5, 0.5)])
def test_the_gradient_scale_multiplies_the_sum(
    adapter: Adapter, scale: float | Literal["mean"] | None, factor: float
) -> None:
    gradient = random_gradient(adapter)
    accumulate(adapter, gradient, weight_sum=4.0)
    metrics = apply_step(adapter, step(scale))
    assert metrics["unclipped_grad_l2:mean"] == pytest.approx(factor * float(gradient.norm()), rel=1e-5)
    assert relative_error(adapter.exp_avg, 0.1 * factor * gradient) < 1e-6


@pytest.mark.parametrize("scale, reason", [("mean", "summed weights"), (float("nan"), "nan is not a finite number")])
def test_an_unusable_gradient_scale_keeps_the_window(
    adapter: Adapter, scale: float | Literal["mean"], reason: str
) -> None:
    accumulate(adapter, random_gradient(adapter), weight_sum=0.0)
    assert reason in refusal(adapter, step(scale))
    assert apply_step(adapter, step())["optimizer_step:last"] == 1.0


def test_at_learning_rate_zero_weights_stay_bit_identical(adapter: Adapter) -> None:
    before = adapter.weights.clone()
    for seed in range(3):
        accumulate(adapter, random_gradient(adapter, seed))
        apply_step(adapter, step(learning_rate=0.0, weight_decay=0.1))
    assert torch.equal(adapter.weights, before)
    assert adapter.num_steps == 3
    accumulate(adapter, torch.zeros_like(before))
    apply_step(adapter, step(learning_rate=1e-6, weight_decay=0.1))
    assert not torch.equal(adapter.weights, before)


def test_a_step_without_gradients_is_refused(adapter: Adapter) -> None:
    assert "no gradients since the last step: call forward_backward first" in refusal(adapter, step())
    assert adapter.num_steps == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_sum_that_is_not_finite_is_refused_and_discarded(adapter: Adapter, value: float) -> None:
    before = adapter.weights.clone()
    for _ in range(2):
        accumulate(adapter, torch.full_like(before, value))
    assert "not finite" in refusal(adapter, step())
    assert torch.equal(adapter.weights, before)
    assert adapter.num_steps == 0
    accumulate(adapter, random_gradient(adapter))
    assert apply_step(adapter, step())["optimizer_step:last"] == 1.0


def test_a_window_that_lost_an_operation_is_refused_and_discarded(adapter: Adapter) -> None:
    before = adapter.weights.clone()
    accumulate(adapter, random_gradient(adapter))
    adapter.gradients.window.refused = "token 9999 is out of range"
    assert "token 9999 is out of range" in refusal(adapter, step())
    assert torch.equal(adapter.weights, before)
    assert "no gradients" in refusal(adapter, step())


def test_an_eps_that_float32_cannot_hold_is_refused(adapter: Adapter) -> None:
    accumulate(adapter, torch.zeros_like(adapter.weights))
    assert "eps 1e-50 is zero in float32" in refusal(adapter, step(eps=1e-50))
    apply_step(adapter, step())
    assert adapter.weights.isfinite().all()


MIXED = [
    step(learning_rate=1e-2, weight_decay=0.1),
    step(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=0.5),
    step(learning_rate=3e-3, beta1=0.8),
    step(0.25, learning_rate=1e-2, weight_decay=0.1),
    step("mean", learning_rate=1e-2, eps=1e-6),
]


def trained_vectors(adapter: Adapter) -> list[torch.Tensor]:
    return [adapter.weights.clone(), adapter.exp_avg.clone(), adapter.exp_avg_sq.clone()]


def test_a_step_is_bit_identical_alone_and_in_a_batch(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    alone = [adapted.create(f"alone-{i}", rank=rank) for i, rank in enumerate((4, 8, 2, 4, 16))]
    together = [copy_adapter(adapted.models, f"alone-{i}", f"together-{i}") for i in range(len(alone))]
    for seed in range(3):
        for adapter in (*alone, *together):
            accumulate(adapter, random_gradient(adapter, seed), weight_sum=4.0)
        answers = apply_steps(together, MIXED)
        assert answers == [apply_step(adapter, step) for adapter, step in zip(alone, MIXED, strict=True)]
        assert [answer["grad_clipped:mean"] for answer in answers if isinstance(answer, dict)] == [0, 1, 0, 0, 0]
    for one, other in zip(alone, together, strict=True):
        assert all(map(torch.equal, trained_vectors(one), trained_vectors(other)))
    assert not torch.equal(together[0].exp_avg, together[3].exp_avg)


def test_a_refused_step_does_not_affect_others_of_its_call(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["llama"])
    adapters = [adapted.create(name) for name in ("empty", "good", "overflow", "lost", "also good")]
    empty, good, overflow, lost, also_good = adapters
    wanted = torch_adamw(good, [random_gradient(good)], [{"learning_rate": 1e-2}])
    before = [adapter.weights.clone() for adapter in adapters]
    for adapter in (good, overflow, lost, also_good):
        accumulate(adapter, random_gradient(adapter))
    overflow.gradients.accumulator[7] = float("inf")
    lost.gradients.window.refused = "it was too large"
    answers = apply_steps(adapters, [step(learning_rate=1e-2)] * len(adapters))
    assert [isinstance(answer, Failure) for answer in answers] == [True, False, True, True, False]
    assert relative_error(good.weights, wanted) < 1e-6
    assert relative_error(before[1], wanted) > 1e-3
    assert not torch.equal(also_good.weights, before[4])
    for adapter, weights in ((empty, before[0]), (overflow, before[2]), (lost, before[3])):
        assert torch.equal(adapter.weights, weights)
        assert adapter.num_steps == 0 and not adapter.exp_avg.any()


def test_a_bfloat16_base_uses_the_weights_of_the_step(tiny_models: dict[str, Path]) -> None:
    adapted = Adapted(tiny_models["qwen3"], dtype="bfloat16")
    adapter = adapted.create("run")
    name = adapter.targets[0].name
    before = adapter.vectors.weight_views()[name][0].clone()
    accumulate(adapter, random_gradient(adapter))
    apply_step(adapter, step(learning_rate=1e-1))
    assert torch.equal(adapter.vectors.weight_views()[name][0], adapter.pairs[name].a.bfloat16())
    assert not torch.equal(adapter.vectors.weight_views()[name][0], before)


def test_a_windows_first_operation_is_not_copied(adapter: Adapter) -> None:
    accumulate(adapter, random_gradient(adapter))
    place = adapter.gradients.accumulator.data_ptr()
    apply_step(adapter, step())
    adapter.gradients.begin_operation()
    assert adapter.gradients.scratch.data_ptr() == place
    assert not adapter.gradients.scratch.any()
    adapter.gradients.commit()
    assert adapter.gradients.accumulator.data_ptr() == place


def test_a_step_without_memory_fails_alone_and_keeps_its_gradients(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = Adapted(tiny_models["llama"])
    new, old = adapted.create("new"), adapted.create("old")
    for adapter in (new, old):
        accumulate(adapter, random_gradient(adapter))
    gradient = new.gradients.accumulator.clone()
    apply_step(old, step())
    accumulate(old, random_gradient(old))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", lambda _: torch.empty(1 << 45))
        failed, stepped = apply_steps([new, old], [step(0.5), step(0.5)])
    assert isinstance(failed, Failure) and failed.category == "server"
    assert "no memory for the optimizer state of" in failed.message
    assert isinstance(stepped, dict) and stepped["optimizer_step:last"] == 2.0
    assert torch.equal(new.gradients.accumulator, gradient)
    assert apply_step(new, step(0.5))["unclipped_grad_l2:mean"] == pytest.approx(float(gradient.norm()) / 2, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_steps_on_cuda_equal_those_on_the_cpu(tiny_models: dict[str, Path]) -> None:
    vectors_on = {}
    for device in ("cpu", "cuda"):
        base = BaseModel(WorkerConfig(ServedModel("tiny", str(tiny_models["llama"])), device=device))
        layers = LoraLayers(base, 8)
        adapters = [new_adapter(layers, LoraConfig(rank=8)) for _ in MIXED]
        for seed in range(2):
            for adapter in adapters:
                accumulate(adapter, random_gradient(adapter, seed), weight_sum=4.0)
            assert all(isinstance(answer, dict) for answer in apply_steps(adapters, MIXED))
        vectors_on[device] = [vector.cpu() for adapter in adapters for vector in trained_vectors(adapter)]
    for found, wanted in zip(vectors_on["cuda"], vectors_on["cpu"], strict=True):
        assert relative_error(found, wanted) < 1e-5
    assert relative_error(vectors_on["cuda"][0], vectors_on["cpu"][6]) > 1e-3

"""Activations against formulas in float64: values, gradients written over their features, and isolation of rows."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu
from trainhouse.workers.ops.fused import EXPERT_ACTIVATIONS, Activation, GatedActivation, Relu2

from ..adapted import relative_error

pytestmark = pytest.mark.usefixtures("either_way")

ROWS, SIZE = 7, 40


def naive_clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=0.7)
    return (up.clamp(-0.7, 0.7) + 1) * gate * torch.sigmoid(1.702 * gate)


CASES: dict[str, tuple[Activation, Callable[..., Tensor]]] = {
    "silu": (EXPERT_ACTIVATIONS["silu"], lambda gate, up: silu(gate) * up),
    "gelu_pytorch_tanh": (
        EXPERT_ACTIVATIONS["gelu_pytorch_tanh"],
        lambda gate, up: gelu(gate, approximate="tanh") * up,
    ),
    "relu2": (EXPERT_ACTIVATIONS["relu2"], lambda up: up.relu() ** 2),
    "clamped": (GatedActivation("clamped", 1.702, 0.7), naive_clamped),
}


def random(columns: int, seed: int) -> Tensor:
    return torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def features_of(activation: Activation) -> Tensor:
    return random(2 * SIZE if isinstance(activation, GatedActivation) else SIZE, seed=1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_values_and_gradients_are_those_of_the_formula(name: str, dtype: torch.dtype, tolerance: float) -> None:
    activation, naive = CASES[name]
    features, grad = features_of(activation).to(dtype), random(SIZE, seed=2).to(dtype)
    leaf = features.double().requires_grad_()
    wanted = naive(*activation.parts(leaf))
    (of_features,) = torch.autograd.grad(wanted, leaf, grad.double())
    with torch.no_grad():
        found = activation(*activation.parts(features))
        activation.overwrite(grad, *activation.parts(features))
    for one, other in ((found, wanted), (features, of_features)):
        assert one.dtype == dtype
        assert relative_error(one.double(), other) < tolerance
        assert relative_error(one.double() * (1 + 2 * tolerance), other) > tolerance


@pytest.mark.parametrize("name", CASES)
def test_nonfinite_values_stay_in_their_row(name: str) -> None:
    activation, _ = CASES[name]
    results = []
    for value in (0.5, math.nan, math.inf):
        features, grad = features_of(activation).float(), random(SIZE, seed=2).float()
        features[3] = value
        found = activation(*activation.parts(features))
        activation.overwrite(grad, *activation.parts(features))
        results.append(torch.cat((found, features), -1))
    others = [0, 1, 2, 4, 5, 6]
    clean, *dirty = (each[others] for each in results)
    assert all(torch.equal(each, clean) for each in dirty)
    assert results[1][3].isnan().any()


def test_relu2_of_a_layer_has_its_gradient() -> None:
    leaf, grad = random(SIZE, seed=1), random(SIZE, seed=2)
    (found,) = torch.autograd.grad(Relu2()(x := leaf.clone().requires_grad_()), x, grad)
    (wanted,) = torch.autograd.grad((y := leaf.clone().requires_grad_()).relu() ** 2, y, grad)
    assert relative_error(found, wanted) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_a_gate_may_share_memory_with_a_tensor_that_another_gradient_needs(name: str, dtype: torch.dtype) -> None:
    """Gates and convolved features of Mamba without a norm are views of one projection."""
    projected = torch.randn(3, 8, dtype=dtype, requires_grad=True)
    gate, mixed = projected.split([4, 4], dim=-1)
    activation = EXPERT_ACTIVATIONS[name]
    activation(gate, mixed.sin()).sum().backward()
    assert projected.grad is not None and projected.grad.isfinite().all()

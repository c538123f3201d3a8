"""Fused norm, rotation and gates against autograd: values, gradients, and isolation of rows."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu
from trainhouse.workers.ops.fused import (
    GATES,
    LayerNorm,
    RmsNorm,
    RotaryTable,
    Rotation,
    rotate_heads,
    swiglu,
)

from ..adapted import relative_error

pytestmark = pytest.mark.usefixtures("either_way")

TOKENS, HEADS, SIZE, EPS = 7, 3, 8, 1e-5
Function = Callable[..., Tensor]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weight(dtype: torch.dtype) -> Tensor:
    return (1 + 0.5 * random(SIZE, seed=9)).to(dtype)


def rotation() -> Rotation:
    return RotaryTable(torch.tensor([1.0, 0.3, 0.1, 0.03]), scale=1.1).at(torch.tensor([0, 1, 2, 3, 0, 1, 9]), 10)


def naive_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def naive_layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return naive_norm(x - x.mean(-1, keepdim=True), weight)


def centering(weight: Tensor) -> LayerNorm:
    return LayerNorm(weight, torch.tensor(EPS))


def weights_of_heads(dtype: torch.dtype) -> Tensor:
    return (1 + 0.5 * random(HEADS, SIZE, seed=9)).to(dtype)


def naive_rotation(x: Tensor) -> Tensor:
    angles = torch.tensor([0, 1, 2, 3, 0, 1, 9])[:, None, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    cos, sin = (1.1 * f(torch.cat((angles, angles), -1)).to(x.dtype) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def norm(dtype: torch.dtype) -> RmsNorm:
    return RmsNorm(weight(dtype), torch.tensor(EPS))


# name -> (fused, naive, shapes of the arguments)
CASES: dict[str, tuple[Function, Function, list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x: norm(x.dtype)(x), lambda x: naive_norm(x, weight(x.dtype)), [(TOKENS, SIZE)]),
    "add_rms_norm": (
        lambda x, y: torch.cat(norm(x.dtype).add(x, y)),
        lambda x, y: torch.cat((x + y, naive_norm(x + y, weight(x.dtype)))),
        [(TOKENS, SIZE)] * 2,
    ),
    "the norm alone of add_rms_norm": (
        lambda x, y: norm(x.dtype).add(x, y)[1],
        lambda x, y: naive_norm(x + y, weight(x.dtype)),
        [(TOKENS, SIZE)] * 2,
    ),
    "rotate_heads": (lambda x: rotate_heads(x, rotation(), None), naive_rotation, [(TOKENS, HEADS, SIZE)]),
    "rotate_heads with norm": (
        lambda x: rotate_heads(x, rotation(), norm(x.dtype)),
        lambda x: naive_rotation(naive_norm(x, weight(x.dtype))),
        [(TOKENS, HEADS, SIZE)],
    ),
    "layer_norm": (
        lambda x: centering(weight(x.dtype))(x),
        lambda x: naive_layer_norm(x, weight(x.dtype)),
        [(TOKENS, SIZE)],
    ),
    "layer_norm with weights for each head": (
        lambda x: centering(weights_of_heads(x.dtype))(x),
        lambda x: naive_layer_norm(x, weights_of_heads(x.dtype)),
        [(TOKENS, HEADS, SIZE)],
    ),
    "swiglu": (swiglu, lambda gate, up: silu(gate) * up, [(TOKENS, SIZE)] * 2),
    "geglu": (GATES["gelu_pytorch_tanh"], lambda gate, up: gelu(gate, approximate="tanh") * up, [(TOKENS, SIZE)] * 2),
}


def evaluate(function: Function, arguments: list[Tensor]) -> list[Tensor]:
    """Returns the output, and each argument's gradient of its sum with random weights."""
    leaves = [argument.clone().requires_grad_() for argument in arguments]
    output = function(*leaves)
    return [output, *torch.autograd.grad((output * random(*output.shape, seed=5).to(output.dtype)).sum(), leaves)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_values_and_gradients_are_those_of_the_formula(name: str, dtype: torch.dtype, tolerance: float) -> None:
    fused, naive, shapes = CASES[name]
    arguments = [random(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    found = evaluate(fused, arguments)
    wanted = evaluate(naive, [argument.double() for argument in arguments])
    with torch.no_grad():
        found.append(fused(*arguments))
    for one, other in zip(found, [*wanted, wanted[0]], strict=True):
        assert one.dtype == dtype
        assert relative_error(one.double(), other) < tolerance
        assert relative_error(one.double() * (1 + 2 * tolerance), other) > tolerance


@pytest.mark.parametrize("name", CASES)
def test_nonfinite_values_stay_in_their_token(name: str) -> None:
    fused, _, shapes = CASES[name]
    clean = [random(*shape, seed=i).float() for i, shape in enumerate(shapes)]
    dirty = [argument.clone() for argument in clean]
    dirty[0][2], dirty[-1][4, ..., 0] = math.nan, math.inf
    before, after = ([by_token(x) for x in evaluate(fused, arguments)] for arguments in (clean, dirty))
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[[0, 1, 3, 5, 6]], other[[0, 1, 3, 5, 6]])
    assert not after[0][2].isfinite().any() and not after[0][4].isfinite().all()


def by_token(x: Tensor) -> Tensor:
    """Reshapes [n * tokens, ...] to [tokens, n, ...]."""
    return x.unflatten(0, (-1, TOKENS)).transpose(0, 1)


def test_rotary_table_grows_with_the_positions() -> None:
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03])
    grown, large = RotaryTable(frequencies, 1.0), RotaryTable(frequencies, 1.0)
    grown.at(torch.tensor([3]), 4)
    positions = torch.tensor([7, 0, 99])
    torch.testing.assert_close(grown.at(positions, 100).cos, large.at(positions, 100).cos, rtol=0, atol=0)
    assert not torch.equal(grown.at(positions, 100).cos, grown.at(positions + 1, 101).cos)

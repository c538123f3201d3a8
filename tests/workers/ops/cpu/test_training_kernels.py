"""training.c against autograd of torch's operations, in shapes that fill its blocks and others, on several threads."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from trainhouse.workers.ops.fused import RmsNorm, Rotation, swiglu
from trainhouse.workers.ops.kernels import Kernels, kernels_for, layer_kernels

TOLERANCE = 3e-6


@pytest.fixture(params=[1, 2])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    loaded, before = kernels_for(torch.empty(1)), torch.get_num_threads()
    assert loaded is not None, "no C compiler here: install gcc or clang"
    torch.set_num_threads(request.param)
    yield loaded
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Asserts that they are close, and that a small error would fail."""
    torch.testing.assert_close(found.double(), wanted.double(), rtol=TOLERANCE, atol=TOLERANCE)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found + 3 * TOLERANCE * (1 + wanted.abs().max()), wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 20), (600, 257)])
def test_gradient_of_a_norm(kernels: Kernels, rows: int, size: int) -> None:
    x, grad, addend, weight = (random(*shape, seed=i) for i, shape in enumerate([(rows, size)] * 3 + [(size,)]))
    norm = RmsNorm(weight, torch.tensor(1e-5))
    leaf = x.double().requires_grad_()
    normed = weight.double() * leaf / (leaf.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    (wanted,) = torch.autograd.grad(normed, leaf, grad.double())
    assert_near(kernels.rms_norm_gradient(grad, x, norm, None), wanted.float())
    assert_near(kernels.rms_norm_gradient(grad, x, norm, addend), wanted.float() + addend)


@pytest.mark.parametrize(("heads", "size", "rotated"), [(1, 2, 2), (3, 20, 8), (4, 128, 128)])
@pytest.mark.parametrize("norm", [None, "shared", "of each head"])
def test_gradient_of_a_rotation(kernels: Kernels, heads: int, size: int, rotated: int, norm: str | None) -> None:
    grad, x = random(200, heads + 2, size)[:, :heads], random(200, heads + 1, size, seed=3)[:, 1:]
    angles = random(200, 1, rotated // 2, seed=1)
    weight = None if norm is None else random(*([] if norm == "shared" else [heads]), size, seed=2)
    leaf = x.double().requires_grad_()
    normed = leaf if weight is None else weight.double() * leaf / (leaf.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    first, second, rest = normed.split([rotated // 2, rotated // 2, size - rotated], -1)
    cos, sin = angles.double().cos(), angles.double().sin()
    out = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    (wanted,) = torch.autograd.grad(out, leaf, grad.double())
    rotation = Rotation(torch.cat((angles, angles), -1).cos(), angles.sin())
    given = (None, rotation, None) if weight is None else (x, rotation, RmsNorm(weight, torch.tensor(1e-5)))
    found = kernels.rotate_heads_gradient(grad, *given)
    assert_near(found, wanted.float())


@pytest.mark.parametrize("size", [1, 20, 768])
def test_gradients_of_swiglu_overwrite_parts_of_a_wider_row(kernels: Kernels, size: int) -> None:
    both, grad = 5 * random(90, 2 * size), random(90, size, seed=1)
    leaf = both.double().requires_grad_()
    gate, up = leaf.split(size, dim=-1)
    (wanted,) = torch.autograd.grad(silu(gate) * up, leaf, grad.double())
    apart = [each.clone() for each in both.split(size, dim=-1)]
    apart[0] = torch.cat((apart[0], apart[0]), 1)[:, :size]
    assert_near(torch.cat(kernels.gated_gradient(grad, *apart, swiglu), 1), wanted.float())
    kernels.gated_gradient(grad, *both.split(size, dim=-1), swiglu)
    assert_near(both, wanted.float())


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("size", [1, 20, 5000])
def test_softmax(size: int) -> None:
    logits, factors = 9 * random(40, size) + 50, random(40, seed=1)
    logits[3, -1] = -math.inf
    logits[5, 0] = math.nan
    wanted = logits.double().log_softmax(-1)
    fine = [row for row in range(40) if row not in ((5,) if size > 1 else (3, 5))]
    found = layer_kernels(logits).log_softmax(logits, torch.empty_like(logits))
    assert_near(found[fine].exp(), wanted[fine].exp().float())
    assert found[5].isnan().all()
    scaled = layer_kernels(found).scaled_exponentials(found, factors)
    assert_near(scaled[fine], (wanted.exp() * factors[:, None]).float()[fine])
    assert scaled[5].isnan().all()


def test_a_large_vocabulary_is_summed_exactly() -> None:
    logits = random(1, 300_000)
    found = layer_kernels(logits).log_softmax(logits, torch.empty_like(logits)).double()
    assert (found - logits.double().log_softmax(-1)).abs().max() < 2e-6


@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (70, 20), (300, 256)])
def test_gradients_of_weighted_sums_of_pairs(kernels: Kernels, tokens: int, size: int) -> None:
    x, weights, grad = random(tokens * 3, size), random(tokens, 3, seed=1), random(tokens, size, seed=2)
    places = torch.randperm(tokens * 3, generator=torch.Generator().manual_seed(3))
    leaves = x.double().requires_grad_(), weights.double().requires_grad_()
    sums = (leaves[0][places].view(tokens, 3, size) * leaves[1].unsqueeze(-1)).sum(1)
    wanted = torch.autograd.grad(sums, leaves, grad.double())
    for mine, other in zip(kernels.combine_pairs_gradient(grad, x, places, weights), wanted, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(mine.double() + 1e-3, other, rtol=1e-5, atol=1e-5)

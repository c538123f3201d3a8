"""The convolution and its gradients against torch's for each sequence alone."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.ops.recurrences.convolution import CausalConvolution

from ...adapted import relative_error
from .cases import CHANNELS, WIDTH, convolution, convolution_inputs, normal

LENGTHS = [1, 2, 3, 4, 5, 1, 1, 12]
PACKING = Packing(pack_lengths(LENGTHS))


def alone(x: Tensor, op: CausalConvolution, weight: Tensor, bias: Tensor | None) -> Tensor:
    outs = [conv1d(pad(row.t(), (WIDTH - 1, 0)), weight, bias, groups=CHANNELS).t() for row in x.split(LENGTHS)]
    return silu(torch.cat(outs)) if op.is_silu else torch.cat(outs)


@pytest.mark.parametrize("is_silu", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_outputs_and_gradients_are_those_of_torch(is_silu: bool, has_bias: bool) -> None:
    op = convolution(is_silu=is_silu, has_bias=has_bias)
    (x,) = (each.requires_grad_() for each in convolution_inputs(sum(LENGTHS), seed=0))
    wanted, (out, _) = alone(x, op, op.weight, op.bias), op.scan([x], PACKING)
    assert relative_error(out, wanted) < 1e-6
    weights = normal(*out.shape, seed=1)
    (found,), (reference,) = (torch.autograd.grad(y, x, weights) for y in (out, wanted))
    assert relative_error(found, reference) < 1e-6
    leaking, _ = op.scan([x], Packing(pack_lengths([sum(LENGTHS)])))
    assert relative_error(leaking, wanted) > 1e-2
    assert relative_error(torch.autograd.grad(leaking, x, weights)[0], reference) > 1e-2


def test_gradients_of_weight_and_bias() -> None:
    op = convolution()
    assert op.bias is not None
    (x,) = (each.requires_grad_() for each in convolution_inputs(sum(LENGTHS), seed=2))
    weight, bias = op.weight.clone().requires_grad_(), op.bias.clone().requires_grad_()
    alone(x, op, weight, bias).square().sum().backward()
    assert weight.grad is not None
    assert bias.grad is not None
    op.weight.requires_grad_()
    op.bias.requires_grad_()
    out, _ = op.scan([x], PACKING)
    out.square().sum().backward()
    assert op.weight.grad is not None and op.bias.grad is not None
    assert relative_error(op.weight.grad, weight.grad) < 1e-5
    assert relative_error(op.bias.grad, bias.grad) < 1e-5
    op.weight.grad.zero_()
    leaking, _ = op.scan([x], Packing(pack_lengths([sum(LENGTHS)])))
    leaking.square().sum().backward()
    assert relative_error(op.weight.grad, weight.grad) > 1e-2


@torch.no_grad()
def test_the_state_is_the_last_inputs() -> None:
    (x,) = convolution_inputs(sum(LENGTHS), seed=3)
    _, states = convolution().scan([x], PACKING)
    for row, state in zip(x.split(LENGTHS), states, strict=True):
        assert torch.equal(state, pad(row.t(), (WIDTH - 1, 0))[:, -(WIDTH - 1) :])

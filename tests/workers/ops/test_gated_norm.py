"""The gated norm of groups against transformers' own, which normalizes after the gate or before it."""

import pytest
import torch
from torch import Tensor
from trainhouse.workers.ops.fused import RmsNorm, gated_group_norm
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

from ..adapted import relative_error

TOKENS, GROUPS, SIZE = 11, 3, 8


def run(gates_first: bool, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the output and the gradients of input, gate and weight: ours, and those of transformers in float32."""
    torch.manual_seed(0)
    x, gate = (torch.randn(TOKENS, GROUPS * SIZE).to(dtype) for _ in range(2))
    theirs = FalconH1RMSNormGated(GROUPS * SIZE, eps=1e-5, n_groups=GROUPS, norm_before_gate=not gates_first)
    theirs.weight.data = torch.randn(GROUPS * SIZE)
    grad = torch.randn(x.shape).bfloat16()
    found, wanted = ([each.clone().to(kind).requires_grad_() for each in (x, gate)] for kind in (dtype, torch.float32))
    weight = torch.nn.Parameter(theirs.weight.data.clone())
    weight.grad = torch.zeros_like(weight)
    norm = RmsNorm(weight, torch.tensor(1e-5))
    ours = gated_group_norm(*(each.view(TOKENS, GROUPS, SIZE) for each in found), norm, gates_first)
    ours.backward(grad.to(dtype))
    out = theirs(wanted[0].unsqueeze(0), wanted[1].unsqueeze(0))[0]
    out.backward(grad.float())
    leaves = [*found, weight], [*wanted, theirs.weight]
    gradients = [[each.grad for each in every if each.grad is not None] for every in leaves]
    return [ours.detach(), *gradients[0]], [out.detach(), *gradients[1]]


@pytest.mark.parametrize("gates_first", [True, False])
def test_values_and_gradients_are_those_of_transformers(gates_first: bool) -> None:
    found, wanted = run(gates_first)
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < 1e-6 < relative_error(one * 1.00001, other)
    assert relative_error(run(not gates_first)[0][0], wanted[0]) > 0.05


def test_bfloat16_rounds_only_inputs_and_outputs() -> None:
    found, wanted = run(True, torch.bfloat16)
    assert [each.dtype for each in found] == [torch.bfloat16] * 3 + [torch.float32]
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one.float(), other) < 4e-3 < relative_error(one.to(torch.float8_e4m3fn).float(), other)

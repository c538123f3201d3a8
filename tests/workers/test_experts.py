"""Experts in grouped products against a loop over them, in values and gradients."""

import pytest
import torch
from torch import nn
from trainhouse.workers.experts import RoutedExperts, grouped_product
from trainhouse.workers.parallel.mesh import Mesh
from transformers import AutoModelForCausalLM

from ..tiny import tiny_config


@pytest.mark.parametrize("num_tokens", [1, 2, 37])
def test_a_layer_is_that_of_transformers(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    model = AutoModelForCausalLM.from_config(
        tiny_config("qwen3_moe"), dtype=torch.float32, experts_implementation="eager"
    )
    block = model.base_model.layers[0].mlp.requires_grad_(False)
    for weight in (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj):
        nn.init.normal_(weight, std=0.3)
    ours = RoutedExperts(block, Mesh().along("ep"))
    x, gradient = torch.randn(num_tokens, 64, requires_grad=True), torch.randn(num_tokens, 64)
    theirs = block(x[None])[0]
    theirs.backward(gradient)
    wanted, x.grad = x.grad, None
    result = ours.forward(x, are_alike=True)
    result.backward(gradient)
    assert wanted is not None and x.grad is not None
    assert (result - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert (x.grad - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    with torch.no_grad():
        assert (ours.forward(x, are_alike=True) - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        # What the bound would not let pass: a token that goes to another expert.
        block.experts.down_proj.copy_(block.experts.down_proj.roll(1, 0))
        assert (ours.forward(x, are_alike=True) - theirs).abs().max() > 1e-2 * theirs.abs().max()


def test_groups_may_be_empty_and_rows_of_none_are_zeros() -> None:
    x, weights = torch.randn(9, 5, requires_grad=True), torch.randn(4, 3, 5)
    y = grouped_product(x, weights, torch.tensor([2, 0, 5, 0]))
    wanted = torch.cat([x[:2] @ weights[0].t(), x[2:7] @ weights[2].t(), torch.zeros(2, 3)])
    assert torch.allclose(y, wanted, atol=1e-6)
    y.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad[2], weights[2].sum(0), atol=1e-6) and not x.grad[7:].any()

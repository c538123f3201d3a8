"""The gated delta rule and its gradients against transformers' rule for each sequence alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.ops.recurrences import chunked_delta
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from ...adapted import relative_error
from .cases import delta, delta_inputs, normal

LENGTHS = [1, 3, 4, 63, 64, 65, 130, 130, 2]
SIZES = pytest.mark.parametrize("size", chunked_delta.CHUNK_SIZES)
Rule = Callable[..., tuple[Tensor, Tensor]]


def scan(inputs: list[Tensor], lengths: list[int]) -> tuple[Tensor, Tensor]:
    return delta().scan(inputs, Packing(pack_lengths(lengths)))


def alone(rule: Rule, inputs: list[Tensor], lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Returns the outputs and the states after each sequence by a rule of transformers."""
    results = []
    for row in zip(*(x.split(lengths) for x in inputs), strict=True):
        q, k, v, g, beta = (x.unsqueeze(0) for x in row)
        results.append(rule(q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True))
    outs, states = zip(*results, strict=True)
    return torch.cat(outs, dim=1)[0], torch.cat(states)


def gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, normal(*out.shape, seed=9))


@SIZES
def test_outputs_states_and_gradients_are_those_of_transformers(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_delta, "CHUNK_SIZES", (size,))
    inputs = [x.requires_grad_() for x in delta_inputs(sum(LENGTHS), seed=0)]
    out, states = scan(inputs, LENGTHS)
    wanted, wanted_states = alone(torch_chunk_gated_delta_rule, inputs, LENGTHS)
    assert relative_error(out, wanted) < 1e-5
    assert relative_error(states, wanted_states) < 1e-5
    expected = gradients(wanted, inputs)
    for found, reference in zip(gradients(out, inputs), expected, strict=True):
        assert relative_error(found, reference) < 1e-5
    # As if the states of two sequences of 130 tokens ran on into the next one.
    leaking, _ = scan(inputs, [*LENGTHS[:6], 260, 2])
    assert relative_error(leaking, wanted) > 1e-3
    for found, reference in zip(gradients(leaking, inputs), expected, strict=True):
        assert relative_error(found, reference) > 1e-3


@torch.no_grad()
def test_equals_the_rule_token_by_token() -> None:
    inputs = delta_inputs(sum(LENGTHS), seed=1)
    out, states = scan(inputs, LENGTHS)
    wanted, wanted_states = alone(torch_recurrent_gated_delta_rule, inputs, LENGTHS)
    assert relative_error(out, wanted) < 1e-5
    assert relative_error(states, wanted_states) < 1e-5


@SIZES
def test_repeated_tokens_lose_no_precision(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal keys that do not decay give the triangular system its largest powers."""
    monkeypatch.setattr(chunked_delta, "CHUNK_SIZES", (size,))
    q, k, v, g, _ = delta_inputs(64, seed=2)
    inputs = [q, k[:1].expand_as(k), v, torch.zeros_like(g), torch.ones_like(g)]
    out, _ = scan([x.clone().requires_grad_() for x in inputs], [64])
    wanted, _ = alone(torch_recurrent_gated_delta_rule, inputs, [64])
    assert relative_error(out, wanted) < 1e-5


def test_strong_decay_does_not_overflow() -> None:
    inputs = delta_inputs(200, seed=3)
    inputs[3] = inputs[3] * 1000
    inputs = [x.requires_grad_() for x in inputs]
    out, _ = scan(inputs, [200])
    wanted, _ = alone(torch_chunk_gated_delta_rule, inputs, [200])
    assert relative_error(out, wanted) < 1e-5
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(out, inputs))


def test_backward_keeps_the_inputs_and_a_state_per_chunk() -> None:
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = [x.requires_grad_() for x in delta_inputs(640, seed=4)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        scan(inputs, [320, 320])
    states = max(640 // size for size in chunked_delta.CHUNK_SIZES) * delta().state.shape[0] * 24 * 16 * 4
    assert sum(kept.values()) <= sum(x.nbytes for x in inputs) + states

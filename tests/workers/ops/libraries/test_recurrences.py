"""Recurrences by libraries' interfaces, which run only on GPUs, against our own form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.ops.libraries.convolution import CausalConv1d
from trainhouse.workers.ops.libraries.gated_delta import FlashLinearAttention
from trainhouse.workers.ops.libraries.probe import Library
from trainhouse.workers.ops.libraries.state_space import MambaSsm
from trainhouse.workers.ops.recurrences.convolution import CausalConvolution, causal_conv1d_on
from trainhouse.workers.ops.recurrences.gated_delta import GatedDeltaRule, flash_linear_attention_on
from trainhouse.workers.ops.recurrences.state_space import StateSpace, mamba_ssm_on

from ...adapted import relative_error
from ..recurrences.cases import normal
from .conftest import Install
from .stand_ins import STAND_INS

LENGTHS = [1, 3, 4, 63, 64, 65, 130, 130, 2, 300, 1]
TOKENS = sum(LENGTHS)


def packed(lengths: Sequence[int]) -> Packing:
    return Packing(pack_lengths(list(lengths)))


def convolution(parameters: Sequence[Tensor]) -> CausalConvolution:
    return CausalConvolution(0, *parameters, True, torch.bfloat16)


def state_space(parameters: Sequence[Tensor]) -> StateSpace:
    return StateSpace(0, 64, 128, *parameters)


def delta(_: Sequence[Tensor]) -> GatedDeltaRule:
    return GatedDeltaRule(0, 4, 128, 64)


def inputs_of(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Returns inputs in bfloat16, and the parameters of the op."""
    seeds = iter(range(100))

    def draw(*shape: int) -> Tensor:
        return normal(*shape, seed=next(seeds), dtype=torch.bfloat16)

    if name == "convolution":
        return [draw(TOKENS, 64)], [draw(64, 1, 4), draw(64)]
    if name == "delta":
        row = [draw(TOKENS, 2, 128), draw(TOKENS, 2, 128), draw(TOKENS, 4, 64)]
        return [*row, -0.2 * draw(TOKENS, 4).float().abs(), draw(TOKENS, 4).sigmoid()], []
    row = [draw(TOKENS, 8, 64), softplus(draw(TOKENS, 8).float() - 1), draw(TOKENS, 2, 128), draw(TOKENS, 2, 128)]
    return row, [draw(8).float().exp().neg(), draw(8)]


@dataclass(frozen=True)
class Case:
    """A recurrence, and what finds its library."""

    op: Callable[[Sequence[Tensor]], Any]
    library_on: Callable[[torch.device], Library | None]


CASES = {
    "convolution": Case(convolution, causal_conv1d_on),
    "delta": Case(delta, flash_linear_attention_on),
    "state_space": Case(state_space, lambda device: mamba_ssm_on(device, 64, 128)),
}


def results(name: str, device: str, lengths: Sequence[int]) -> list[Tensor]:
    """Returns output, states, gradients, the output of a step and the states after it."""
    row, parameters = ([x.to(device).requires_grad_() for x in each] for each in inputs_of(name))
    op = CASES[name].op(parameters)
    out, states = op.scan(row, packed(lengths))
    weights = normal(*out.shape, seed=99, dtype=torch.bfloat16).to(device)
    found = [out, states.clone(), *torch.autograd.grad(out, [*row, *parameters], weights)]
    with torch.no_grad():
        slots = torch.arange(len(lengths) - 1, -1, -1, device=device)
        found += [op.step([x[: len(lengths)] for x in row], states, slots), states]
    return [each.detach().float().cpu() for each in found]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_a_library_on_a_gpu_computes_the_same(name: str) -> None:
    module = STAND_INS[name].module
    pytest.importorskip(module, reason=f"{module} is not installed")
    device = torch.empty(0, device="cuda").device
    if name == "delta" and (reason := FlashLinearAttention.misfit(device)) is not None:
        pytest.skip(reason)
    assert CASES[name].library_on(device) is not None
    found, wanted = results(name, "cuda", LENGTHS), results(name, "cpu", LENGTHS)
    errors = [relative_error(one, other) for one, other in zip(found, wanted, strict=True)]
    assert max(errors) < 3e-2, errors
    # As if the states of two sequences of 130 tokens ran on into the next one.
    leaking = results(name, "cpu", [*LENGTHS[:6], 260, *LENGTHS[8:]])[0]
    assert relative_error(leaking, wanted[0]) > 3e-2


@torch.no_grad()
def test_batches_of_the_state_space_begin_with_the_states_of_their_sequences(install: Install) -> None:
    install("state_space")
    row, parameters = inputs_of("state_space")
    op, initial = state_space(parameters), normal(len(LENGTHS), 8, 64, 128, seed=50)
    wanted, wanted_states = op.scan(row, packed(LENGTHS), initial)
    found, states = op.scan_by(MambaSsm(), row, packed(LENGTHS), initial)
    assert relative_error(found.float(), wanted.float()) < 1e-2
    assert relative_error(states, wanted_states) < 1e-5
    swapped, _ = op.scan_by(MambaSsm(), row, packed(LENGTHS), initial.flip(0))
    assert relative_error(swapped.float(), wanted.float()) > 3e-2


@torch.no_grad()
def test_convolutions_with_initial_states_stay_with_torch(install: Install) -> None:
    install("convolution")
    row, parameters = inputs_of("convolution")
    op, initial = convolution(parameters), normal(len(LENGTHS), 64, 3, seed=50, dtype=torch.bfloat16)
    found, _ = op.scan_by(CausalConv1d(), row, packed(LENGTHS), initial)
    assert torch.equal(found, op.scan(row, packed(LENGTHS), initial)[0])
    assert not torch.equal(found, op.scan_by(CausalConv1d(), row, packed(LENGTHS))[0])


def test_a_row_that_is_part_of_a_wider_one_is_convolved(install: Install) -> None:
    """The kernel reads 16 bytes at a time, so rows must begin at multiples of these."""
    install("convolution")
    _, parameters = inputs_of("convolution")
    op, wide = convolution(parameters), normal(9, 101, seed=51, dtype=torch.bfloat16)
    for x in (wide[:, 3:67], wide[:1, 3:67]):
        found, _ = op.scan_by(CausalConv1d(), [x], packed([len(x)]))
        assert relative_error(found.float(), op.scan([x], packed([len(x)]))[0].float()) < 1e-2


@pytest.mark.parametrize(
    ("x", "weight", "bias", "reason"),
    [
        (torch.bfloat16, (64, 1, 4), torch.bfloat16, None),
        (torch.bfloat16, (64, 2), None, None),
        (torch.float32, (64, 1, 4), torch.float32, "float32"),
        (torch.bfloat16, (64, 1, 5), torch.bfloat16, "5"),
        (torch.bfloat16, (60, 1, 4), torch.bfloat16, "60"),
        (torch.bfloat16, (64, 1, 4), torch.float32, "float32"),
    ],
)
def test_which_convolutions_fit(
    x: torch.dtype, weight: tuple[int, ...], bias: torch.dtype | None, reason: str | None
) -> None:
    own = None if bias is None else torch.empty(weight[0], dtype=bias)
    dtype = bias if x == torch.float32 else torch.bfloat16
    found = CausalConv1d.misfit(torch.empty(2, weight[0], dtype=x), torch.empty(weight, dtype=dtype), own)
    assert found is None if reason is None else found is not None and reason in found


def test_only_bfloat16_fits_the_state_space() -> None:
    assert MambaSsm.misfit(torch.empty(0, dtype=torch.bfloat16)) is None
    assert "float32" in (MambaSsm.misfit(torch.empty(0)) or "")

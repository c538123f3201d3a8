"""Every recurrence: sequences of a packed row alone, a row in two parts, token by token, and NaN in one sequence."""

import pytest
import torch
from torch import Tensor
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.ops.recurrence import recur

from ...adapted import relative_error
from .cases import CASES, Case

LENGTHS = [1, 3, 4, 63, 64, 65, 130, 2]
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def packed(lengths: list[int]) -> Packing:
    return Packing(pack_lengths(lengths))


def rows(inputs: list[Tensor], lengths: list[int]) -> list[list[Tensor]]:
    """Returns the inputs of each sequence."""
    return [list(parts) for parts in zip(*(x.split(lengths) for x in inputs), strict=True)]


@EACH
@torch.no_grad()
def test_sequences_of_a_packed_row_are_computed_as_each_alone(case: Case) -> None:
    inputs = case.inputs(sum(LENGTHS), 0, torch.float32)
    alone = [case.op.scan(row, packed([len(row[0])])) for row in rows(inputs, LENGTHS)]
    out, states = case.op.scan(inputs, packed(LENGTHS))
    assert states.shape == (len(LENGTHS), *case.op.state.shape)
    assert states.dtype == case.op.state.dtype
    assert relative_error(out, torch.cat([each for each, _ in alone])) < 1e-6
    assert relative_error(states, torch.cat([each for _, each in alone])) < 1e-6
    assert torch.equal(recur(case.op, inputs, packed(LENGTHS)), out)
    leaking, _ = case.op.scan(inputs, packed([sum(LENGTHS)]))
    assert relative_error(leaking, out) > 1e-2


@EACH
@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1] * 8, [0, 1, 2, 33, 63, 64, 65, 1], [1, 2, 1, 62, 1, 1, 129, 0]])
def test_a_row_goes_on_from_the_states_of_its_first_part(case: Case, cuts: list[int]) -> None:
    inputs = case.inputs(sum(LENGTHS), 1, torch.float32)
    out, states = case.op.scan(inputs, packed(LENGTHS))
    sequences = rows(inputs, LENGTHS)
    initial = torch.zeros_like(states)
    for i, (row, cut) in enumerate(zip(sequences, cuts, strict=True)):
        if cut:
            _, initial[i : i + 1] = case.op.scan([x[:cut] for x in row], packed([cut]))
    rests = [[x[cut:] for x in row] for row, cut in zip(sequences, cuts, strict=True)]
    kept = [i for i, rest in enumerate(rests) if len(rest[0])]
    second = [torch.cat([rests[i][j] for i in kept]) for j in range(len(inputs))]
    lengths = [len(rests[i][0]) for i in kept]
    found, after = case.op.scan(second, packed(lengths), initial[kept])
    wanted = torch.cat([part[cut:] for part, cut in zip(out.split(LENGTHS), cuts, strict=True)])
    assert relative_error(found, wanted) < 1e-5
    assert relative_error(after, states[kept]) < 1e-5
    swapped, _ = case.op.scan(second, packed(lengths), initial[kept].flip(0))
    assert relative_error(swapped, wanted) > 1e-3


@EACH
@torch.no_grad()
def test_steps_compute_the_same_as_a_scan(case: Case) -> None:
    length, slots = 70, torch.tensor([4, 1])
    inputs = case.inputs(2 * length, 2, torch.float32)
    out, states = case.op.scan(inputs, packed([length, length]))
    cache = torch.full((6, *case.op.state.shape), 7.0, dtype=case.op.state.dtype)
    cache[slots] = 0
    steps = [case.op.step([x.unflatten(0, (2, length))[:, i] for x in inputs], cache, slots) for i in range(length)]
    assert relative_error(torch.stack(steps, dim=1).flatten(0, 1), out) < 1e-5
    assert relative_error(cache[slots], states) < 1e-5
    assert bool((cache[[0, 2, 3, 5]] == 7).all())


@EACH
@pytest.mark.parametrize("poisoned", range(len(LENGTHS)))
def test_nan_stays_in_its_sequence(case: Case, poisoned: int) -> None:
    inputs = [x.requires_grad_() for x in case.inputs(sum(LENGTHS), 3, torch.float32)]
    out, states = case.op.scan(inputs, packed(LENGTHS))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    clean = [out, *torch.autograd.grad(out, inputs, weights)]
    start = sum(LENGTHS[:poisoned])
    own = slice(start, start + LENGTHS[poisoned])
    spoiled = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        for x in spoiled:
            x[own] = torch.nan
        weights[own] = torch.inf
    dirty_out, dirty_states = case.op.scan(spoiled, packed(LENGTHS))
    dirty = [dirty_out, *torch.autograd.grad(dirty_out, spoiled, weights)]
    others = torch.ones(sum(LENGTHS), dtype=torch.bool)
    others[own] = False
    assert all(torch.equal(x[others], y[others]) for x, y in zip(clean, dirty, strict=True))
    assert bool(dirty_out[own].isnan().all())
    kept = [i for i in range(len(LENGTHS)) if i != poisoned]
    assert torch.equal(states[kept], dirty_states[kept])
    leaking, _ = case.op.scan(spoiled, packed([sum(LENGTHS)]))
    assert bool(leaking[others][start:].isnan().any()) == (poisoned < len(LENGTHS) - 1)


@EACH
def test_bfloat16_is_as_near_as_its_rounding(case: Case) -> None:
    exact = [x.requires_grad_() for x in case.inputs(sum(LENGTHS), 5, torch.float32)]
    rounded = [x.detach().requires_grad_() for x in case.inputs(sum(LENGTHS), 5, torch.bfloat16)]
    found, _ = case.op.scan(rounded, packed(LENGTHS))
    wanted, _ = case.op.scan(exact, packed(LENGTHS))
    assert found.dtype == torch.bfloat16
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(6))
    gradients = torch.autograd.grad(found, rounded, weights.bfloat16())
    pairs = zip([found, *gradients], [wanted, *torch.autograd.grad(wanted, exact, weights)], strict=True)
    for ours, reference in pairs:
        assert 0 < relative_error(ours.float(), reference) < 2e-2
    assert [gradient.dtype for gradient in gradients] == [x.dtype for x in rounded]
    leaking, _ = case.op.scan(rounded, packed([sum(LENGTHS)]))
    assert relative_error(leaking.float(), wanted) > 2e-2

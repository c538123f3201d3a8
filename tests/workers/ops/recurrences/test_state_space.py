"""The state-space recurrence of Mamba-2 against a loop over tokens and transformers' own scan."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.ops.recurrences.state_space import CHUNK_SIZES, StateSpace
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from ...adapted import relative_error
from .cases import GROUPS, HEAD_DIM, HEADS, STATE_DIM

# With states of these sizes sequences run in chunks of 16 tokens.
MIXED = [1, 16, 15, 33, 17, 16, 16, 50]

Scan = Callable[[Sequence[Tensor]], Tensor]


def random_inputs(num_tokens: int, head_dim: int = HEAD_DIM, state_dim: int = STATE_DIM) -> list[Tensor]:
    """Returns x, dt, b, c, and the layer's a and skip."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = (num_tokens, HEADS, head_dim), (num_tokens, HEADS), *[(num_tokens, GROUPS, state_dim)] * 2
    x, dt, b, c = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x, softplus(dt - 1), b, c, torch.randn(HEADS, generator=generator).exp().neg(), torch.randn(HEADS)]


def op_of(inputs: Sequence[Tensor]) -> StateSpace:
    return StateSpace(3, inputs[0].shape[2], inputs[2].shape[2], *inputs[4:])


def packed(lengths: Sequence[int]) -> Packing:
    return Packing(pack_lengths(list(lengths)))


def scanned(lengths: Sequence[int]) -> Scan:
    return lambda inputs: op_of(inputs).scan(inputs[:4], packed(lengths))[0]


def each_token(inputs: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Computes the recurrence token by token in float64; returns the output and the states after each sequence."""
    x, dt, b, c, a, skip = (each.double() for each in inputs)
    b, c = (each.repeat_interleave(HEADS // GROUPS, dim=1).unsqueeze(2) for each in (b, c))
    decay, written = (dt * a).exp()[:, :, None, None], (x * dt.unsqueeze(2)).unsqueeze(3) * b
    found, after = [], []
    for tokens in torch.arange(len(x)).split(list(lengths)):
        state = torch.zeros_like(written[0])
        for token in tokens:
            state = state * decay[token] + written[token]
            found.append((state * c[token]).sum(2) + x[token] * skip[:, None])
        after.append(state)
    return torch.stack(found), torch.stack(after)


def of_transformers(lengths: Sequence[int]) -> Scan:
    def run(inputs: Sequence[Tensor]) -> Tensor:
        *row, a, skip = inputs
        alone = zip(*(each.split(list(lengths)) for each in row), strict=True)
        found = [mamba2_chunk_scan(x[None], dt[None], a, b[None], c[None], 32, skip)[0] for x, dt, b, c in alone]
        return torch.cat(found)

    return run


def value_and_gradients(run: Scan, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = run(leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).bfloat16()  # exact in every dtype
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize(
    "lengths", [[1], [15], [16], [17], [48], [49], [16, 16, 16], [5, 5, 5, 20], MIXED, sorted(MIXED)]
)
def test_scan_and_its_gradients_are_those_of_a_loop(lengths: list[int]) -> None:
    inputs = random_inputs(sum(lengths))
    found = value_and_gradients(scanned(lengths), inputs)
    wanted = value_and_gradients(lambda each: each_token(each, lengths)[0], inputs)
    assert len(found) == len(wanted) == 7
    for one, other in zip(found, wanted, strict=True):
        # A state's decay has no gradient in sequences of one token.
        assert (one - other).norm() < 1e-5 * other.norm() + 1e-6
        assert (one * 1.0001 - other).norm() > 1e-5 * other.norm() + 1e-6 or not other.any()


def test_scan_and_its_gradients_are_those_of_transformers() -> None:
    inputs = random_inputs(sum(MIXED))
    found, wanted = (value_and_gradients(run(MIXED), inputs) for run in (scanned, of_transformers))
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < 1e-5 < relative_error(one * 1.0001, other)
    # A state that reaches the next sequence is something else.
    assert relative_error(scanned([sum(MIXED)])(inputs), wanted[0]) > 0.05


@pytest.mark.parametrize(("head_dim", "state_dim"), [(5, 7), (16, 64), (32, 128), (64, 256), (64, 512)])
def test_chunks_of_all_sizes_agree(head_dim: int, state_dim: int) -> None:
    """The sizes of states decide how many tokens a chunk has."""
    lengths = [200, 3, 130]
    inputs = random_inputs(sum(lengths), head_dim, state_dim)
    with torch.no_grad():
        found, states = op_of(inputs).scan(inputs[:4], packed(lengths))
        wanted, after = each_token(inputs, lengths)
    assert relative_error(found.double(), wanted) < 1e-6 < relative_error(found.double() * 1.00001, wanted)
    assert relative_error(states.double(), after) < 1e-6


def test_chunks_are_larger_with_larger_states() -> None:
    chosen: set[int] = set()
    for state_dim in (4, 64, 128, 512):
        packing, inputs = packed([256]), random_inputs(256, 64, state_dim)
        op_of(inputs).scan(inputs[:4], packing)
        (chunks,) = packing.layouts.values()
        chosen.add(chunks.size)
    assert len(chosen) == len(CHUNK_SIZES)


def test_decays_to_nothing_leave_the_others_exact() -> None:
    """Some time steps are so long that nothing of a state remains; differences of float32 sums would be inexact."""
    inputs = random_inputs(256, 64, 64)
    inputs[1] = 10 ** torch.empty(256, HEADS).uniform_(-4, 1.5, generator=torch.Generator().manual_seed(1))
    found, wanted = scanned([256])(inputs), each_token(inputs, [256])[0]
    assert relative_error(found.double(), wanted) < 3e-7
    total = (inputs[1] * inputs[4]).cumsum(0)
    assert relative_error(total.diff(dim=0), (inputs[1] * inputs[4])[1:]) > 3e-7


def test_bfloat16_rounds_only_inputs_and_outputs() -> None:
    inputs = random_inputs(sum(MIXED))
    low = [each.bfloat16() if i in (0, 2, 3) else each for i, each in enumerate(inputs)]
    found = value_and_gradients(scanned(MIXED), low)
    assert [each.dtype == torch.bfloat16 for each in found] == [True, True, False, True, True, False, False]

    wanted = value_and_gradients(lambda each: each_token(each, MIXED)[0], [each.float() for each in low])
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one.double(), other.double()) < 4e-3
        assert relative_error(one.to(torch.float8_e4m3fn).double(), other.double()) > 4e-3


def test_only_inputs_and_states_are_kept() -> None:
    lengths, kept = [64], []
    leaves = [each.requires_grad_() for each in random_inputs(64)]
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        scanned(lengths)(leaves)
    given = {each.data_ptr() for each in leaves}
    (states,) = [each for each in kept if each.data_ptr() not in given]
    assert len(kept) == 7
    assert states.numel() == 3 * HEADS * HEAD_DIM * STATE_DIM  # 4 chunks, of which the first starts without a state

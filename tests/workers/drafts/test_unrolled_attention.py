"""Attention of an unrolled draft equals one masked softmax over the keys of all steps, in float64."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from trainhouse.workers.drafts.sequences.sequence_shard import SequenceShard
from trainhouse.workers.drafts.sequences.unrolled_attention import attend_unrolled
from trainhouse.workers.ops.attention import AttentionKind, Packing, attend, pack_lengths

from ..adapted import relative_error
from ..parallel.live_bytes import LiveBytes

HEADS, HEAD_DIM = 4, 8
LENGTHS = [5, 5, 1, 9, 33]
KIND = AttentionKind(0, HEAD_DIM**-0.5)

DTYPES = [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]


def drawn(kv_heads: int, num_steps: int, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Returns random float64 tensors: the query, then the keys, then the values of each step."""
    heads = [HEADS, *[kv_heads] * (2 * num_steps)]
    return [torch.randn(sum(lengths), each, HEAD_DIM, dtype=torch.float64) for each in heads]


def sees(num_steps: int, lengths: Sequence[int]) -> Tensor:
    """Returns the attention mask, bool [tokens, steps * tokens]."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    first = torch.zeros(bounds[-1], bounds[-1], dtype=torch.bool)
    for start, stop in pairwise(bounds):
        first[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril().bool()
    return torch.cat([first, *[torch.eye(len(first)).bool()] * (num_steps - 1)], dim=1)


def naive(tensors: Sequence[Tensor], seen: Tensor) -> Tensor:
    query, num_steps = tensors[0], len(tensors) // 2
    keys, values = torch.cat(list(tensors[1 : 1 + num_steps])), torch.cat(list(tensors[1 + num_steps :]))
    repeats = HEADS // keys.shape[1]
    outs = []
    for head in range(HEADS):
        scores = query[:, head] @ keys[:, head // repeats].t() * KIND.scaling
        outs.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values[:, head // repeats])
    return torch.stack(outs, dim=1)


def unrolled(tensors: Sequence[Tensor], lengths: Sequence[int] = LENGTHS) -> Tensor:
    num_steps = len(tensors) // 2
    packing = Packing(pack_lengths(list(lengths)))
    return attend_unrolled(
        tensors[0], tensors[1 : 1 + num_steps], tensors[1 + num_steps :], packing, KIND, SequenceShard(len(tensors[0]))
    )


def result_and_gradients(out: Tensor, tensors: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad((out * weight.to(out)).sum(), tensors)]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_equals_one_softmax_over_the_keys_of_all_steps(
    num_steps: int, kv_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    assert_exact(torch.device("cpu"), num_steps, kv_heads, dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_equals_one_softmax_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    assert_exact(torch.device("cuda"), 3, 2, dtype, tolerance)


def assert_exact(device: torch.device, num_steps: int, kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    exact = [each.to(dtype).double().requires_grad_() for each in drawn(kv_heads, num_steps)]
    leaves = [each.detach().to(device, dtype).requires_grad_() for each in exact]
    weight = torch.randn(sum(LENGTHS), HEADS, HEAD_DIM, dtype=torch.float64)
    found = result_and_gradients(unrolled(leaves), leaves, weight)
    wanted = result_and_gradients(naive(exact, sees(num_steps, LENGTHS)), exact, weight)
    for mine, other in zip(found, wanted, strict=True):
        error = relative_error(mine.double().cpu(), other)
        assert mine.dtype == dtype
        assert error < tolerance < relative_error(mine.double().cpu() * (1 + 2 * tolerance), other)


@pytest.mark.parametrize("wrong", ["no own keys", "own keys of the neighbour", "another packing", "not causal"])
def test_attending_to_other_keys_changes_the_result(wrong: str) -> None:
    tensors, seen, num_tokens = drawn(2, 3), sees(3, LENGTHS), sum(LENGTHS)
    match wrong:
        case "no own keys":
            seen[:, num_tokens:] = False
        case "own keys of the neighbour":
            seen[:, num_tokens:] = seen[:, num_tokens:].roll(1, 1)
        case "another packing":
            seen = sees(3, [*LENGTHS[2:], *LENGTHS[:2]])
        case "not causal":
            seen[:, :num_tokens] |= seen[:, :num_tokens].t()
    found = unrolled(tensors)
    assert relative_error(found, naive(tensors, sees(3, LENGTHS))) < 1e-14
    assert relative_error(found, naive(tensors, seen)) > 1e-2


@pytest.mark.parametrize(("num_steps", "kv_heads"), [(1, 2), (3, 2), (2, 4)])
def test_gradients_pass_gradcheck(num_steps: int, kv_heads: int) -> None:
    lengths = [1, 3]
    leaves = [each.requires_grad_() for each in drawn(kv_heads, num_steps, lengths)]
    assert torch.autograd.gradcheck(lambda *tensors: unrolled(tensors, lengths), leaves)


def test_first_step_is_plain_attention() -> None:
    query, key, value = drawn(2, 1)
    wanted = attend(query, key, value, Packing(pack_lengths(LENGTHS)), KIND)
    assert torch.equal(unrolled([query, key, value]), wanted)


def test_large_scores_do_not_overflow() -> None:
    tensors = [100.0 * each.float() for each in drawn(2, 3)]
    exact = [each.double() for each in tensors]
    leaves = [each.requires_grad_() for each in tensors]
    found = result_and_gradients(unrolled(leaves), leaves, torch.ones(()))
    assert all(each.isfinite().all() for each in found)
    assert relative_error(found[0].double(), naive(exact, sees(3, LENGTHS))) < 1e-4


def test_memory_grows_linearly_with_tokens() -> None:
    lengths = [1536]

    def peak(attended: Callable[[list[Tensor]], Tensor]) -> int:
        leaves = [each.float().requires_grad_() for each in drawn(2, 3, lengths)]
        with LiveBytes() as live:
            attended(leaves).sum().backward()
        return live.peak

    most = 8 * sum(each.float().nbytes for each in drawn(2, 3, lengths))
    assert peak(lambda leaves: unrolled(leaves, lengths)) < most < 4 * lengths[0] ** 2
    assert peak(lambda leaves: naive(leaves, sees(3, lengths))) > most

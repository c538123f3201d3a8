"""Attention in parts of a sequence that do not see each other, in rows and over a cache, against each part alone."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from trainhouse.workers.ops.attention import AttendingPacking, AttentionKind, Packing, attend, pack_lengths
from trainhouse.workers.ops.kv_cache import CachedRow, ContinuationChunk

from .test_attention import HEAD_DIM, HEADS, KV_HEADS
from .test_kv_cache import fresh, new_slot_tensors, step

pytestmark = pytest.mark.usefixtures("either_way")

SIZE = 4
LENGTHS = (3, 9, 9, 4)


def tensors(num_tokens: int) -> list[Tensor]:
    """Returns query, key and value [tokens, heads, head_dim]."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(num_tokens, heads, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def in_parts(qkv: Sequence[Tensor], packing: Packing | AttendingPacking) -> Tensor:
    query, key, value = qkv
    return attend(query, key, value, packing, AttentionKind(0, HEAD_DIM**-0.5, part=SIZE))


def part_by_part(qkv: Sequence[Tensor], lengths: Sequence[int], size: int = SIZE) -> Tensor:
    found = []
    for sequence in zip(*(x.split(list(lengths)) for x in qkv), strict=True):
        for query, key, value in zip(*(x.split(size) for x in sequence), strict=True):
            packing = Packing(pack_lengths([len(query)]))
            found.append(attend(query, key, value, packing, AttentionKind(0, HEAD_DIM**-0.5)))
    return torch.cat(found)


def assert_equal_in_these_parts_only(found: Tensor, qkv: Sequence[Tensor], lengths: Sequence[int]) -> None:
    torch.testing.assert_close(found, part_by_part(qkv, lengths), atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, part_by_part(qkv, lengths, SIZE + 1), atol=1e-5, rtol=1e-5)


def test_parts_of_packed_sequences_attend_as_each_alone() -> None:
    qkv = [x.requires_grad_() for x in tensors(sum(LENGTHS))]
    found, wanted = in_parts(qkv, Packing(pack_lengths(list(LENGTHS)))), part_by_part(qkv, LENGTHS)
    assert_equal_in_these_parts_only(found.detach(), [x.detach() for x in qkv], LENGTHS)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    gradients = [torch.autograd.grad((out * weight).sum(), qkv) for out in (found, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(1.001 * ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("slots", [[0, 1], [2, 0]])
def test_decoded_tokens_see_their_part_of_the_cache(slots: list[int]) -> None:
    """One sequence passes into its third part, the other stays in its first."""
    lengths, cache = (11, 3), new_slot_tensors()
    qkv = tensors(sum(lengths))
    sequences = list(zip(*(x.split(list(lengths)) for x in qkv), strict=True))
    cached = [length - 2 for length in lengths]
    firsts = [torch.cat([each[i][:-2] for each in sequences]) for i in range(3)]
    in_parts(firsts, fresh(cache, cached, slots))
    steps = step(cache, slots, cached)
    for number in (-2, -1):
        rows = [torch.stack([each[i][number] for each in sequences]) for i in range(3)]
        found = in_parts(rows, CachedRow((steps,), (), None, 2, ()))
        wanted = torch.stack(
            [part_by_part(each, [length])[number] for each, length in zip(sequences, lengths, strict=True)]
        )
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(found.flip(0), wanted, atol=1e-5, rtol=1e-5)
        steps.advance()


@pytest.mark.parametrize("cuts", [(2, 3), (4, 8), (5, 10)])
def test_a_sequence_in_pieces_attends_as_in_one(cuts: tuple[int, int]) -> None:
    qkv, cache = tensors(13), new_slot_tensors()
    found = [in_parts([x[: cuts[0]] for x in qkv], fresh(cache, [cuts[0]], [3]))]
    for start, stop in zip(cuts, (*cuts[1:], 13), strict=True):
        chunk = ContinuationChunk(0, stop - start, cache, 3, start)
        found.append(in_parts([x[start:stop] for x in qkv], CachedRow((), [chunk], None, stop - start, ())))
    assert_equal_in_these_parts_only(torch.cat(found), qkv, [13])

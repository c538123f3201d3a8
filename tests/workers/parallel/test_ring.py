"""Ring attention equals attention of one rank, in values and gradients."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.tests.workers.parallel.attending import HEAD_DIM, Attending, attended
from trainhouse.workers.lora.segment import overlap
from trainhouse.workers.ops.attention import Packing, attend, pack_lengths
from trainhouse.workers.ops.partial_attention import attend_part, part_gradients
from trainhouse.workers.parallel.mesh import Mesh, Team
from trainhouse.workers.parallel.ring import Ring
from trainhouse.workers.parallel.token_shard import TokenShard, num_tokens_in
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.shapes.sequence_split import SequenceSplit

from .training import layout

UNEVEN = (13, 1, 2, 30, 5, 5, 8, 40, 3)

CASES = {
    "packed": Attending(UNEVEN),
    "filled up": Attending((7,)),
    "one sequence": Attending((64,)),
    "shorter than a stripe": Attending((1,)),
    "window": Attending(UNEVEN, window=7),
    "window of some stripes": Attending(UNEVEN, window=2),
    "window of a token": Attending(UNEVEN, window=1),
    "grouped queries": Attending(UNEVEN, heads=15, kv_heads=5),
    "as many heads": Attending(UNEVEN, heads=3, kv_heads=3),
    "heads shared out first": Attending(UNEVEN, heads=6, kv_heads=2),
    "one key head": Attending(UNEVEN, heads=6, kv_heads=1, window=9),
    "sinks": Attending(UNEVEN, has_sinks=True),
    "sinks in a window": Attending(UNEVEN, heads=15, kv_heads=5, window=7, has_sinks=True),
    "sinks of heads that are shared out first": Attending(UNEVEN, heads=8, kv_heads=2, has_sinks=True),
    "a cap": Attending(UNEVEN, heads=15, kv_heads=5, window=7, cap=0.8),
    "a cap for heads that are shared out first": Attending(UNEVEN, heads=8, kv_heads=2, cap=0.8),
    "bfloat16": Attending(UNEVEN, dtype=torch.bfloat16),
    "bfloat16 with sinks": Attending(UNEVEN, dtype=torch.bfloat16, has_sinks=True),
    "bfloat16 in a window": Attending(UNEVEN, dtype=torch.bfloat16, window=7),
}

Attends = Callable[[Attending], list[np.ndarray]]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def on_ranks(
    request: pytest.FixtureRequest, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attends]:
    with layout(tiny_models["qwen3"], ParallelSpec(sp=request.param), tmp_path_factory.mktemp("ranks")) as where:
        yield lambda case: where.probe(attended, case)[0]


def exact(case: Attending, tensors: list[Tensor] | None = None) -> list[Tensor]:
    """Computes one softmax in float64: the result twice, and the gradients of query, key and value, and of any sinks.

    tensors: those of another case.
    """
    *leaves, grad = (x.double() for x in tensors or case.tensors())
    query, key, value = (leaf.requires_grad_() for leaf in leaves)
    times = case.heads // case.kv_heads
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(times, 1)) * HEAD_DIM**-0.5
    scores = scores if case.cap is None else case.cap * (scores / case.cap).tanh()
    number = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    place = torch.arange(len(number))
    distance = place[:, None] - place
    sees = (number[:, None] == number) & (distance >= 0) & (distance < (case.window or 10**9))
    scores = scores.masked_fill(~sees, -torch.inf)
    if (sinks := case.sinks()) is not None:
        leaves.append(sinks.double().requires_grad_())
        scores = torch.cat([scores, leaves[-1][:, None, None].expand(-1, len(place), 1)], -1)
    weights = scores.softmax(-1)[..., : len(place)]
    out = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(times, 1))
    return [out.detach(), out.detach(), *torch.autograd.grad(out, leaves, grad)]


def are_close(ours: list[np.ndarray], theirs: list[Tensor], tolerance: float) -> list[bool]:
    pairs = zip(map(torch.from_numpy, ours), theirs, strict=True)
    return [bool((one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))) for one, other in pairs]


@pytest.mark.parametrize("name", CASES)
def test_ring_attention_equals_one_rank(name: str, on_ranks: Attends) -> None:
    case = CASES[name]
    found, tolerance = on_ranks(case), 1e-5 if case.dtype == torch.float32 else 2e-2
    assert are_close(found, exact(case), tolerance) == [True] * len(found)
    # The bounds detect another window size, sinks or a cap that are left out, or sequences that see each other.
    num_tokens, others = sum(case.lengths), [replace(case, window=4), replace(case, has_sinks=not case.has_sinks)]
    if case.cap is not None:
        others.append(replace(case, cap=None))
    if case.window != 1:
        others.append(replace(case, lengths=(num_tokens - 1, 1)))
    for other in others if num_tokens > 1 else ():
        out_is_close, _, *gradients_are_close = are_close(found[:5], exact(other, case.tensors())[:5], tolerance)
        assert not (out_is_close or any(gradients_are_close)), other


# On one rank


@pytest.mark.parametrize(
    ("sp", "heads", "kv_heads", "split"),
    [
        (1, 3, 1, (1, 1)), (2, 8, 4, (2, 1)), (8, 32, 8, (8, 1)), (4, 4, 2, (4, 1)), (2, 3, 1, (1, 2)),
        (2, 6, 3, (1, 2)), (4, 6, 2, (2, 2)), (16, 8, 1, (8, 2)), (64, 32, 8, (32, 2)), (12, 8, 4, (4, 3)),
    ],
)  # fmt: skip
def test_heads_are_split_before_a_ring_is_used(sp: int, heads: int, kv_heads: int, split: tuple[int, int]) -> None:
    assert SequenceSplit.of(sp, heads, kv_heads) == SequenceSplit(*split)


class _Place(Team):
    """One rank of a team that exchanges nothing."""

    def __init__(self, index: int, size: int) -> None:
        super().__init__(tuple(range(size)), index, None)


@pytest.mark.parametrize("ring", [2, 3, 8])
def test_each_query_meets_each_key_once_and_work_is_even(ring: int) -> None:
    lengths = (*UNEVEN, 200)
    packing, starts = Packing(pack_lengths(list(lengths))), np.cumsum([0, *lengths])
    met, work = np.zeros((sum(lengths), sum(lengths)), int), []
    for index in range(ring):
        own, stripes = Ring(packing, _Place(index, ring), SequenceSplit(1, ring)), np.arange(sum(lengths))
        for step in range(ring):
            block = own.block(step, torch.device("cpu"))
            if block is None:
                continue
            queries, keys = stripes[index::ring][block.queries], stripes[(index - step) % ring :: ring][block.keys]
            for group in block.packing.groups:
                for start in range(group.start, group.start + group.count * group.length, group.length):
                    for i in range(group.length):
                        met[queries[start + i], keys[start : start + i + 1]] += 1
        work.append(met.sum() - sum(work))
    sees = np.zeros_like(met)
    for start, stop in pairwise(starts):
        sees[start:stop, start:stop] = np.tril(np.ones((stop - start, stop - start), int))
    assert np.array_equal(met, sees)
    assert max(work) < 1.1 * min(work)
    # With contiguous shares the last one would have most of the work.
    parts = [sees[rows].sum() for rows in np.array_split(np.arange(len(sees)), ring)]
    assert max(parts) > 1.1 * min(parts)


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (3, 4), (4, 30), (7, 7), (20, 40), (40, 50)])
@pytest.mark.parametrize("tokens", [slice(0, 30), slice(2, 32, 3), slice(10, 20, 1), slice(5, 5, 2)])
def test_overlap_selects_the_tokens_in_range(tokens: slice, start: int, stop: int) -> None:
    places = np.arange(60)[tokens]
    assert num_tokens_in(tokens) == len(places)
    inside = places[overlap(tokens, start, stop)]
    assert np.array_equal(inside, places[(places >= start) & (places < stop)])


def test_joined_stripes_are_in_order() -> None:
    share = TokenShard(10, Mesh())
    assert share.tokens == slice(0, 10, 1) and share.joined(torch.arange(10)).tolist() == list(range(10))


@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("most_scores", [1, 1 << 10, 1 << 22])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("cap", [None, 0.8])
def test_chunked_attention_equals_the_whole(
    window: int | None, most_scores: int, has_sinks: bool, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's fused kernel is turned off."""
    from trainhouse.workers.ops import attention, blockwise_attention
    from trainhouse.workers.shapes.parts import windows

    monkeypatch.setattr(windows, "MAX_SCORES", most_scores)
    monkeypatch.setattr(attention, "flash_on_cpu", blockwise_attention.attend_in_chunks)
    monkeypatch.setattr(attention, "flash_gradients_on_cpu", blockwise_attention.gradients_in_chunks)
    case = Attending((70, 70, 9), heads=4, kv_heads=2, window=window, has_sinks=has_sinks, cap=cap)
    kind = case.kind(case.sinks())
    *qkv, grad = case.tensors()
    whole = attend_part(*qkv, case.packing, kind)
    gradients = part_gradients(grad, *qkv, whole, case.packing, kind)
    found = [whole.out, whole.out, *gradients]
    assert are_close([x.numpy() for x in found], exact(case)[:5], 1e-5) == [True] * 5
    assert torch.allclose(attend(*qkv, case.packing, kind), whole.out, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("most_scores", [1, 1 << 22])
def test_chunks_of_the_last_queries_see_all_keys(
    window: int | None, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainhouse.workers.ops import blockwise_attention
    from trainhouse.workers.shapes.parts import windows

    monkeypatch.setattr(windows, "MAX_SCORES", most_scores)
    case = Attending((70,), heads=4, kv_heads=2, window=window)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in case.tensors()[:3])
    whole = blockwise_attention.attend_in_chunks(query, key, value, case.kind(None))
    last = blockwise_attention.attend_in_chunks(query[:, :, 30:], key, value, case.kind(None))
    for some, every in zip(last, whole, strict=True):
        torch.testing.assert_close(some, every[:, :, 30:], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(some, every[:, :, 29:-1], atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("cap", [None, 0.8])
def test_gpu_attention_equals_cpu(window: int | None, dtype: torch.dtype, has_sinks: bool, cap: float | None) -> None:
    case = Attending(UNEVEN, heads=4, kv_heads=2, window=window, dtype=dtype, has_sinks=has_sinks, cap=cap)
    both: list[list[Tensor]] = []
    for device in ("cpu", "cuda"):
        sinks = case.sinks()
        kind = case.kind(None if sinks is None else sinks.to(device))
        *qkv, grad = (x.to(device) for x in case.tensors())
        whole = attend_part(*qkv, case.packing, kind)
        both.append([x.float().cpu() for x in (*whole, *part_gradients(grad, *qkv, whole, case.packing, kind))])
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)

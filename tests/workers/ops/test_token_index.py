"""The tokens that an indexer chooses, and attention to them, against naive forms for each sequence."""

import math

import pytest
import torch
from torch import Tensor
from trainhouse.workers.ops.attention import AttentionKind, Packing, attend, pack_lengths
from trainhouse.workers.ops.blockwise_attention import attend_to_copies
from trainhouse.workers.ops.token_index import (
    IndexKind,
    IndexQueries,
    choose,
    choose_for_each,
    choose_for_last,
)
from trainhouse.workers.shapes.parts import windows

from ..adapted import relative_error
from ..parallel.live_bytes import LiveBytes

HEADS, HEAD_DIM, MOST = 3, 8, 6
LENGTHS = [5, 40, 6, 7, 40, 1, 55]
KIND = AttentionKind(0, HEAD_DIM**-0.5)
FEW_AT_A_TIME = pytest.mark.parametrize("few", [False, True], ids=["at once", "few at a time"])


@pytest.fixture
def blocks(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes blocks of queries as small as possible."""
    if few:
        monkeypatch.setattr(windows, "MAX_INDEX_SCORES", 1)
        monkeypatch.setattr(windows, "_MAX_CHOSEN", 1)
        monkeypatch.setattr(windows, "MAX_SCORES", 1)


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def index_inputs(num_tokens: int) -> tuple[IndexQueries, Tensor]:
    """Returns queries and keys. One head: many scores are 0."""
    return IndexQueries(some(num_tokens, 1, HEAD_DIM), some(num_tokens, 1, seed=1)), some(num_tokens, 1, HEAD_DIM)


def naive_choice(queries: IndexQueries, key: Tensor) -> list[set[int]]:
    """Returns what each token of a sequence sees: the best by score, then the earliest."""
    chosen = []
    for position, (query, weights) in enumerate(zip(*queries, strict=True)):
        scores = [sum(w * max(q @ k, 0) for q, w in zip(query, weights, strict=True)) for k in key[: position + 1, 0]]
        best = sorted(range(position + 1), key=lambda place, scores=scores: (-scores[place], place))
        chosen.append({*best[:MOST]})
    return chosen


def naive_attention(query: Tensor, key: Tensor, value: Tensor, seen: list[set[int]]) -> Tensor:
    """Attends to the tokens that are seen; each head has its own keys."""
    hidden = torch.ones(len(query), len(key), dtype=torch.bool)
    for row, places in zip(hidden, seen, strict=True):
        row[[*places]] = False
    scores = torch.einsum("qhd,khd->hqk", query, key) * KIND.scaling
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)


@FEW_AT_A_TIME
@pytest.mark.usefixtures("blocks")
def test_the_highest_scores_of_each_sequence_are_chosen() -> None:
    (queries, key), packing = index_inputs(sum(LENGTHS)), Packing(pack_lengths(LENGTHS))
    chosen = choose(queries, key, packing, IndexKind(0, MOST))
    assert chosen is not None and chosen.shape == (sum(LENGTHS), MOST)
    start = 0
    for length in LENGTHS:
        own = slice(start, start + length)
        wanted = naive_choice(queries.rows(own), key[own])
        assert [{*row.tolist()} for row in chosen[own][MOST:]] == wanted[MOST:]
        if length > MOST:  # by chunks, and token by token
            for first in (0, 3, MOST, length - 1):
                last = choose_for_last(queries.rows(slice(start + first, start + length)), key[own, 0], MOST)
                assert seen_by(last, range(first, length)) == wanted[first:]
            slots, positions = torch.full((length,), 1), torch.arange(length)
            cached = torch.stack([key[own, 0] + 1, key[own, 0]])
            each = choose_for_each(queries.rows(own), cached, slots, positions, MOST)
            assert seen_by(each, range(length)) == wanted
        start += length


def seen_by(chosen: Tensor, positions: range) -> list[set[int]]:
    """Returns the chosen tokens that are not after the queries at these positions."""
    return [{place for place in row.tolist() if place <= at} for row, at in zip(chosen, positions, strict=True)]


def test_nothing_is_chosen_where_all_tokens_are_seen() -> None:
    (queries, key), kind = index_inputs(2 * MOST), IndexKind(0, MOST)
    assert choose(queries, key, Packing(pack_lengths([MOST, MOST])), kind) is None
    assert choose(queries, key, Packing(pack_lengths([MOST - 1, MOST + 1])), kind) is not None


@FEW_AT_A_TIME
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("shares_keys", [False, True])
def test_attention_and_its_gradients_are_those_of_a_mask(shares_keys: bool) -> None:
    (queries, key_of_index), packing = index_inputs(sum(LENGTHS)), Packing(pack_lengths(LENGTHS))
    kind = KIND.choosing(choose(queries, key_of_index, packing, IndexKind(0, MOST)))
    heads = (HEADS, 1, 1) if shares_keys else (HEADS,) * 3
    inputs = [some(sum(LENGTHS), number, HEAD_DIM, seed=i).requires_grad_() for i, number in enumerate(heads)]
    query, key, value = inputs
    grad = some(sum(LENGTHS), HEADS, HEAD_DIM, seed=7)
    found, wanted = attend(query, key, value, packing, kind), by_sequence(inputs, queries, key_of_index)
    gradients, others = (torch.autograd.grad(each, inputs, grad) for each in (found, wanted))
    for one, other in zip((found, *gradients), (wanted, *others), strict=True):
        assert relative_error(one, other) < 2e-6
        assert relative_error(one * (1 + 1e-5), other) > 2e-6
    assert relative_error(attend(query, key, value, packing, KIND), wanted) > 0.1
    with torch.no_grad():
        assert torch.equal(attend(query, key, value, packing, kind), found)


def by_sequence(inputs: list[Tensor], queries: IndexQueries, key_of_index: Tensor) -> Tensor:
    parts, start = [], 0
    for length in LENGTHS:
        own = slice(start, start + length)
        query, key, value = (x[own].expand(-1, HEADS, -1) for x in inputs)
        parts.append(naive_attention(query, key, value, naive_choice(queries.rows(own), key_of_index[own])))
        start += length
    return torch.cat(parts)


@FEW_AT_A_TIME
@pytest.mark.usefixtures("blocks")
def test_attention_in_a_cache_is_that_of_the_row() -> None:
    length = 40
    (queries, key_of_index), positions = index_inputs(length), torch.arange(length)
    query, key = some(length, HEADS, HEAD_DIM, seed=3), some(length, 1, HEAD_DIM, seed=4)
    cached, slots = torch.stack([key[:, 0] + 1, key[:, 0]]), torch.full((length,), 1)
    seen = naive_choice(queries, key_of_index)
    keys = key.expand(-1, HEADS, -1)
    chosen = choose_for_last(queries, key_of_index[:, 0], MOST)
    found = attend_to_copies(query, cached, slots, positions, KIND.choosing(chosen))
    assert relative_error(found, naive_attention(query, keys, keys, seen)) < 1e-6
    other = attend_to_copies(query, cached, slots, positions - 1, KIND.choosing(chosen))
    assert relative_error(other, naive_attention(query, keys, keys, seen)) > 0.01


def test_a_nonfinite_sequence_leaves_the_others_alone() -> None:
    lengths = [20, 30, 20]
    queries, key = index_inputs(sum(lengths))
    query, keys, values = (some(sum(lengths), HEADS, HEAD_DIM, seed=i) for i in range(3))
    packing = Packing(pack_lengths(lengths))

    def out() -> Tensor:
        return attend(query, keys, values, packing, KIND.choosing(choose(queries, key, packing, IndexKind(0, MOST))))

    before = out()
    for each in (*queries, key, query, keys, values):
        each[20:50] = math.nan
    after = out()
    assert torch.equal(before[:20], after[:20]) and torch.equal(before[50:], after[50:])
    assert after[20:50].isnan().all()


def test_memory_grows_with_the_length_not_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_of_pass(1024) > 3 * peak_of_pass(512)  # the control: all queries at a time
    monkeypatch.setattr(windows, "MAX_INDEX_SCORES", 1 << 14)
    monkeypatch.setattr(windows, "_MAX_CHOSEN", 1 << 14)
    assert peak_of_pass(1024) < 2.2 * peak_of_pass(512)


def peak_of_pass(length: int) -> int:
    packing = Packing(pack_lengths([length]))
    queries, key = index_inputs(length)
    query, keys, values = (some(length, 1, HEAD_DIM, seed=i).requires_grad_() for i in range(3))
    with LiveBytes() as live:
        kind = KIND.choosing(choose(queries, key, packing, IndexKind(0, MOST)))
        attend(query, keys, values, packing, kind).sum().backward()
    return live.peak

"""Acceptance lengths: the number of verification passes that a text takes, compared with a simulation."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from trainhouse.workers.drafts.losses.draft_scores import DraftScores
from trainhouse.workers.drafts.training.acceptance import Survivals, SurvivalTable, acceptance_lengths

LENGTHS = (150, 1, 40, 2, 97)


def random_survivals(num_tokens: int, depth: int) -> np.ndarray:
    """Returns [2, num_tokens, depth], greedy and sampled, with hard and easy passages."""
    random = np.random.default_rng(0)
    hardness = np.where(np.arange(num_tokens) // 20 % 2, 0.1, 0.9)[:, None]
    greedy = (random.random((num_tokens, depth)) < hardness).cumprod(1)
    sampled = (random.random((num_tokens, depth)) ** (1 - hardness)).cumprod(1)
    return np.stack([greedy, sampled]).astype(np.float32)


def random_weights(num_tokens: int) -> np.ndarray:
    return np.repeat(np.random.default_rng(1).integers(-1, 2, num_tokens // 7 + 1), 7)[:num_tokens].astype(np.float32)


def naive_passes(survivals: np.ndarray, weights: np.ndarray, lengths: Sequence[int]) -> tuple[float, float]:
    """Computes forward the probability that a pass begins after each token. survivals: [n, depth]."""
    tokens = passes = 0.0
    start = 0
    for length in lengths:
        j = start
        while j < start + length:
            if weights[j] == 0:
                j += 1
                continue
            stop = j
            while stop < start + length and weights[stop] != 0:
                stop += 1
            begins = {j + 1: 1.0} if j + 1 < stop else {}
            tokens += max(stop - j - 1, 0)
            for k in range(j + 1, stop):
                begun = begins.pop(k, 0.0)
                passes += begun
                survived = [1.0, *survivals[k].tolist(), 0.0]
                for n in range(len(survived) - 1):
                    begins[k + 1 + n] = begins.get(k + 1 + n, 0.0) + begun * (survived[n] - survived[n + 1])
            j = stop
        start += length
    return tokens, passes


@pytest.mark.parametrize("depth", [1, 4, 90])
def test_passes_equal_a_pass_by_pass_simulation(depth: int) -> None:
    num_tokens = sum(LENGTHS)
    values, weights = random_survivals(num_tokens, depth), random_weights(num_tokens)
    whole = Survivals(np.arange(num_tokens), values)
    found = acceptance_lengths([whole], weights, LENGTHS)
    for kind, kind_values in zip(("greedy", "sampled"), values, strict=True):
        tokens, passes = naive_passes(kind_values, weights, LENGTHS)
        assert found[f"acceptance_length/{kind}"] == pytest.approx((tokens, passes), rel=1e-12)


def test_greedy_passes_follow_a_hand_computed_example() -> None:
    survivals = np.zeros((2, 12, 3), np.float32)
    survivals[0, [2, 4, 5, 6], 0] = 1
    survivals[0, [4, 5], 1] = 1
    survivals[0, 4, 2] = 1
    weights = np.array([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0], np.float32)
    # Passes begin after token 2, then after 4, 8, 9 and 10.
    found = acceptance_lengths([Survivals(np.arange(12), survivals)], weights, [12])
    assert found == {"acceptance_length/greedy": (9.0, 5.0), "acceptance_length/sampled": (9.0, 9.0)}


def test_parts_of_ranks_combine_to_the_whole() -> None:
    """Each rank has other tokens, or some of the draft tokens after the same tokens."""
    num_tokens, depth = sum(LENGTHS), 4
    values, weights = random_survivals(num_tokens, depth), random_weights(num_tokens)
    whole = acceptance_lengths([Survivals(np.arange(num_tokens), values)], weights, LENGTHS)
    first, last = values[:, :160].copy(), values[:, 140:].copy()
    first[:, 140:, 2:] = np.nan
    last[:, :20, :2] = np.nan
    parts = [Survivals(np.arange(140, num_tokens), last), Survivals(np.arange(160), first)]
    assert acceptance_lengths(parts, weights, LENGTHS) == whole


def test_missing_draft_tokens_take_the_mean_of_the_sequence() -> None:
    num_tokens, depth = sum(LENGTHS), 4
    values, weights = random_survivals(num_tokens, depth), random_weights(num_tokens)
    values[:, 149, 2:] = np.nan  # past the end of the sequence
    scored = np.append(np.arange(0, 150, 3), np.arange(149, num_tokens))
    found = acceptance_lengths([Survivals(scored, values[:, scored])], weights, LENGTHS)
    filled = np.where(np.isin(np.arange(num_tokens), scored)[:, None], values, np.nan)
    first_mean = np.nanmean(filled[:, :150], axis=1)
    for kind, kind_values, mean in zip(("greedy", "sampled"), filled, first_mean, strict=True):
        kind_values[np.isnan(kind_values[:, 0])] = mean
        wanted = naive_passes(np.nan_to_num(kind_values), weights, LENGTHS)
        assert found[f"acceptance_length/{kind}"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("length", [6, 30, 300])
def test_estimate_from_some_tokens_is_close_to_the_exact_value(length: int) -> None:
    random, depth = np.random.default_rng(2), 7
    weights = np.tile(np.array([0] + [1] * length, np.float32), 2000 // length)
    values = (random.random((2, len(weights), depth)) < 0.8).astype(np.float32).cumprod(2)
    scored = np.flatnonzero(random.random(len(weights)) < 0.9)
    whole, some = (
        acceptance_lengths([Survivals(tokens, values[:, tokens])], weights, [len(weights)])
        for tokens in (np.arange(len(weights)), scored)
    )
    for kind, (tokens, passes) in whole.items():
        assert some[kind] == (tokens, pytest.approx(passes, rel=0.03))
        assert some[kind][1] != passes


def test_texts_without_weights_take_no_passes() -> None:
    values = random_survivals(10, 4)
    for weights in ([0] * 10, [1] + [0] * 9, [1, 0] * 5):
        found = acceptance_lengths([Survivals(np.arange(10), values)], np.array(weights, np.float32), [10])
        assert set(found.values()) == {(0.0, 0.0)}
    assert acceptance_lengths([], np.zeros(10, np.float32), [10]) == found


def test_scores_may_be_added_in_any_order() -> None:
    """Rows are per token, with the draft tokens that each token before it predicts."""
    num_tokens, depth = 20, 3
    values = random_survivals(num_tokens, depth)
    label_indices = torch.arange(num_tokens)[:, None].expand(-1, depth)
    anchors = label_indices - torch.arange(depth)
    # The first token is never predicted.
    exists = (anchors > 0).float()
    greedy, sampled = (
        torch.from_numpy(each)[anchors.clamp(min=0), torch.arange(depth).expand_as(anchors)] * exists for each in values
    )
    table = SurvivalTable(num_tokens, depth, label_indices.device)
    nothing = torch.zeros(num_tokens, depth)
    for rows in (slice(11, 20), slice(0, 4), slice(4, 11)):
        parts = (each[rows] for each in (nothing, nothing, nothing, nothing, exists, greedy, sampled))
        table.add(DraftScores(*parts), label_indices[rows])
    found = table.survivals(np.arange(100, 120))
    np.testing.assert_array_equal(found.anchors, np.arange(101, 120))
    num_missing = np.isnan(found.values[0]).sum(1)
    np.testing.assert_array_equal(num_missing, [0] * 17 + [1, 2])
    np.testing.assert_array_equal(found.values[:, :17], values[:, 1:18])

"""Parts that only EAGLE-3 has: which tokens are scored, the target's distribution, and acceptance."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from trainhouse.workers.drafts.algorithms.draft_token_chunk import TargetDistribution
from trainhouse.workers.shapes.logit_budget import LogitBudget

from .case import AMPLE, SOME_TOKENS, VOCABULARY, Case, TargetSequence, new_case, target_sequences, trained
from .naive import NaiveEagle3, naively_trained

ALL_TOKENS = range(VOCABULARY)


@pytest.fixture(scope="module")
def case() -> Case:
    return new_case("eagle3", SOME_TOKENS)


@pytest.fixture(scope="module")
def sequences(case: Case) -> list[TargetSequence]:
    return target_sequences(case)


def weighted(sequence: TargetSequence, rows: slice) -> TargetSequence:
    weights = torch.zeros_like(sequence.weights)
    weights[rows] = 1.0
    return replace(sequence, weights=weights)


def test_weights_apply_to_the_predicted_token() -> None:
    """The first two tokens of a sequence are never predicted, and the last one is the label of the last row."""
    case = new_case("eagle3")
    given = target_sequences(case)[3]
    for row, counts in ((0, False), (1, True), (len(given) - 1, True)):
        found = trained(case, [weighted(given, slice(row, row + 1))])
        assert bool(found.scores["exists"]) == counts
        assert all(bool(gradient.any()) == counts for gradient in found.gradients.values())


@pytest.mark.parametrize("chunk_rows", [1, 7, 10_000])
def test_only_weighted_tokens_and_predictions_leading_there_are_scored(
    case: Case, sequences: list[TargetSequence], chunk_rows: int
) -> None:
    """Each sequence has an answer; only it and the predictions that must be right before it are scored."""
    given = [weighted(each, slice(len(each) // 2, len(each) // 2 + 2)) for each in sequences]
    weights = torch.cat([each.weights for each in given])
    leading = {row - ahead for row in weights.nonzero().flatten().tolist() for ahead in range(case.depth)}
    draft_pass = case.new_pass(case.parameters, given, LogitBudget(chunk_rows))
    scored = draft_pass.label_indices(slice(0, draft_pass.num_rows))[:, 0].tolist()
    assert set(scored) == {row for row in leading if row >= 0} and len(scored) < len(weights)
    assert trained(case, given, LogitBudget(chunk_rows)).difference(naively_trained(case, given)) < 1e-9


def test_sequences_of_one_token_do_not_count(case: Case, sequences: list[TargetSequence]) -> None:
    ones = [replace(each, number=10 + each.number) for each in target_sequences(case, [1, 1, 1])]
    assert not trained(case, ones).scores["exists"]
    assert trained(case, [*ones, *sequences]).difference(trained(case, sequences)) < 1e-12


@pytest.mark.parametrize("vocabulary", [ALL_TOKENS, SOME_TOKENS], ids=["all", "some"])
@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_target_distributions_do_not_depend_on_the_chunk_size(vocabulary: Sequence[int], num_rows: int) -> None:
    logits = 3 * torch.randn(33, VOCABULARY)
    parts = [TargetDistribution.of(some, torch.tensor(vocabulary)) for some in logits.split(num_rows)]
    whole = TargetDistribution.of(logits, torch.tensor(vocabulary))
    for name in ("restricted", "share", "top_token", "covered"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    exact = logits.double().softmax(-1)[:, list(vocabulary)]
    torch.testing.assert_close((whole.restricted * whole.share).double(), exact, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(whole.restricted.double() * 0.999, exact, rtol=1e-5, atol=1e-7)


def test_ties_for_the_likeliest_token_go_to_the_first() -> None:
    logits = torch.zeros(5, VOCABULARY)
    logits[:, 4:9] = 2.0
    assert TargetDistribution.of(logits, torch.tensor(SOME_TOKENS)).top_token.tolist() == [4] * 5


def perfect(vocabulary: Sequence[int], length: int = 9) -> tuple[Case, TargetSequence]:
    """Returns a draft whose state never changes, and a target with the same features and logits everywhere: the draft's
    own logits, and a constant for tokens that the draft cannot propose.
    """
    case = new_case("eagle3", vocabulary)
    still = {name: 0 * each for name, each in case.parameters.items() if "o_proj" in name or "down_proj" in name}
    case = replace(case, parameters={**case.parameters, **still})
    (sequence,) = target_sequences(case, [length])
    captured = sequence.captured[:1].expand(length, -1)
    sequence = replace(sequence, captured=captured, weights=torch.ones_like(sequence.weights))
    (drafted,) = NaiveEagle3(case, case.parameters, sequence, 1).distributions(1)
    logits = torch.full((length, VOCABULARY), -3.0, dtype=torch.float64)
    logits[:, case.vocabulary] = drafted.log()
    return case, replace(sequence, logits=logits)


def test_perfect_draft_is_always_accepted() -> None:
    case, given = perfect(ALL_TOKENS)
    found = trained(case, [given])
    for name in ("acceptance", "correct", "covered", "greedy", "sampled"):
        assert all(float(each) == pytest.approx(1, abs=1e-12) for each in found.scores[name].values())
    assert all(gradient.abs().max() < 1e-12 for gradient in found.gradients.values())


def test_pruned_draft_is_accepted_with_the_targets_share_of_its_tokens() -> None:
    case, given = perfect(SOME_TOKENS)
    scores = trained(case, [given]).scores
    share = float(given.logits[0].softmax(0)[list(SOME_TOKENS)].sum())
    assert 0.1 < share < 0.9
    for key, acceptance in scores["acceptance"].items():
        assert float(acceptance) == pytest.approx(share)
        assert float(scores["sampled"][key]) == pytest.approx(share ** (key[2] + 1))


@pytest.mark.parametrize("budget", [LogitBudget(1), AMPLE], ids=["row by row", "all"])
def test_draft_tokens_after_a_wrong_one_are_not_accepted(budget: LogitBudget) -> None:
    case, given = perfect(ALL_TOKENS)
    wrong, logits = 4, given.logits.clone()
    logits[wrong] *= -1.0
    scores = trained(case, [replace(given, logits=logits)], budget).scores
    for key in scores["exists"]:
        _, label, step = key
        # Earlier draft tokens from the same anchor were for the labels up to this one.
        is_after = wrong in range(label - step, label + 1)
        assert float(scores["correct"][key]) == float(label != wrong)
        assert float(scores["greedy"][key]) == float(not is_after)
        assert (float(scores["sampled"][key]) < 1 - 1e-6) == is_after

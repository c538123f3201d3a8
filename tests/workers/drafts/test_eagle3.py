"""Parts that only EAGLE-3 has: which tokens are scored, and the target's distribution."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from trainhouse.workers.drafts.algorithms.draft_token_chunk import TargetDistribution
from trainhouse.workers.shapes.logit_budget import LogitBudget

from .case import SOME_TOKENS, VOCABULARY, Case, TargetSequence, new_case, target_sequences, trained
from .naive import naively_trained

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

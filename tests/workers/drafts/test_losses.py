"""The losses of drafts at draft tokens that do not count."""

import math

import pytest
import torch
from torch import Tensor
from trainhouse.workers.drafts.losses import DRAFT_LOSSES
from trainhouse.workers.drafts.losses.draft_scores import DraftGradients, DraftScores
from trainhouse.workers.losses.loss import LossOutput


@pytest.mark.parametrize(
    ("name", "objective"), [(name, each) for name, loss in DRAFT_LOSSES.items() for each in loss.choices["objective"]]
)
@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_draft_token_that_does_not_count_may_have_any_score(name: str, objective: str, score: float) -> None:
    loss, finite = DRAFT_LOSSES[name], torch.tensor([[0.5, 0.25], [0.5, 0.75]])
    weights = torch.tensor([[1.0, 2.0], [1.0, 0.0]])

    def computed(scores: Tensor) -> tuple[LossOutput, DraftGradients]:
        ones = torch.ones(2, 2)
        draft, leaves = DraftScores(scores, scores, ones, ones, ones, ones, scores).leaves()
        output = loss.function(draft, {"weights": weights}, {**loss.config, "objective": objective})
        return output, DraftGradients.of(output.losses, leaves)

    (wanted, slopes), (found, gradients) = computed(finite), computed(torch.where(weights != 0, finite, score))
    assert torch.equal(found.losses, wanted.losses) and found.losses[0].all()
    assert torch.equal(gradients.cross_entropy, slopes.cross_entropy)
    assert torch.equal(gradients.acceptance, slopes.acceptance)
    assert found.ratios == wanted.ratios and found.ratios["acceptance/2"] == (0.25, 1.0)

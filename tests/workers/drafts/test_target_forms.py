"""The forms in which a draft reads its target's distribution keep all of it, or approximate it within a bound."""

from typing import Any

import pytest
import torch
from torch import Tensor
from trainhouse.schemas.training import TargetRepr
from trainhouse.workers.drafts.sequences.target_form import TargetDistribution, TargetForm, target_form

VOCAB_SIZE = 60
SOME = torch.arange(3, 43, 2)
ALL = torch.arange(VOCAB_SIZE)


def form_of(target_repr: TargetRepr, vocabulary: Tensor, top_k: int | None = None, cap: float | None = None) -> Any:
    return target_form(target_repr, top_k, 16, VOCAB_SIZE, vocabulary, cap)


def some_logits(dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(200, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))).to(dtype)


def read(form: TargetForm, logits: Tensor) -> TargetDistribution:
    kept = form.kept(logits.clone())
    assert {name: each.shape[1] for name, each in kept.items()} == {
        name: column.width for name, column in form.columns.items()
    }
    return form.distribution(kept)


def same(one: TargetDistribution, other: TargetDistribution) -> bool:
    names = ("restricted", "share", "top_token", "covered")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("target_repr", ["logits", "pruned_logits"])
def test_all_logits_and_those_of_the_draft_vocabulary_keep_the_distribution(
    target_repr: TargetRepr, cap: float | None, dtype: torch.dtype
) -> None:
    logits = some_logits(dtype)
    capped = logits.float() if cap is None else cap * torch.tanh(logits.float() / cap)
    wanted = TargetDistribution.of(capped, SOME)
    assert same(read(form_of(target_repr, SOME, cap=cap), logits), wanted)
    assert not same(read(form_of(target_repr, SOME, cap=None if cap else 5.0), logits), wanted)
    assert wanted.share.max() < 1 and not wanted.covered.all(), "tokens outside the vocabulary have some probability"


def naive_top(probs: Tensor, top_k: int) -> Tensor:
    """Spreads the probability of all but the likeliest tokens evenly over these."""
    spread = probs.clone()
    for row in spread:
        others = row.argsort(descending=True)[top_k:]
        row[others] = row[others].mean()
    return spread


@pytest.mark.parametrize("vocabulary", [SOME, ALL], ids=["some", "all"])
@pytest.mark.parametrize("top_k", [1, 8, VOCAB_SIZE - 1])
def test_top_logits_approximate_within_the_probability_of_the_rest(vocabulary: Tensor, top_k: int) -> None:
    logits, generator = some_logits(), torch.Generator().manual_seed(4)
    probs, exact = logits.softmax(-1), TargetDistribution.of(logits, vocabulary)
    rest = 1 - probs.topk(top_k).values.sum(-1)
    found = read(form_of("pruned_logits", vocabulary, top_k), logits)
    own = naive_top(probs, top_k)[:, vocabulary]
    torch.testing.assert_close(found.restricted * found.share, own, atol=1e-6, rtol=1e-5)
    assert torch.equal(found.top_token, exact.top_token) and torch.equal(found.covered, exact.covered)
    of_draft = torch.randn(len(logits), len(vocabulary), generator=generator).softmax(-1)
    acceptances = [torch.minimum(of_draft, each.restricted * each.share).sum(-1) for each in (found, exact)]
    errors = [(acceptances[0] - acceptances[1]).abs(), (found.share - exact.share).abs().squeeze(1)]
    assert all((error <= rest + 1e-6).all() for error in errors)
    is_exact = top_k == VOCAB_SIZE - 1
    assert (max(float(error.max()) for error in errors) < 1e-5) is is_exact, "fewer logits must show"

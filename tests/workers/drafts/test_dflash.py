"""Parts that only DFlash has: anchors, block attention and its losses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainhouse.workers.drafts.losses.dflash import DFLASH
from trainhouse.workers.drafts.losses.draft_scores import DraftScores
from trainhouse.workers.drafts.sequences import block_attention
from trainhouse.workers.drafts.sequences.block_attention import KeyValues, attend_blocks
from trainhouse.workers.drafts.sequences.blocks import Blocks, TokenRandom, sample_anchors
from trainhouse.workers.drafts.sequences.features import Labels
from trainhouse.workers.ops.attention import Packing, pack_lengths

from .case import (
    BLOCK_SIZE,
    OPTIONS,
    TargetSequence,
    drawn,
    labels,
    new_case,
    target_sequences,
)
from .naive import dflash_denominator, dflash_factors

CASE = new_case("dflash")


class LargestTensor(TorchDispatchMode):
    """size: number of elements of the largest tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, Tensor):
                self.size = max(self.size, each.numel())
        return out


def test_attention_never_holds_scores_of_all_blocks_by_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    most, num_tokens, heads = 1 << 16, 400, 2
    monkeypatch.setattr(block_attention, "MAX_SCORES", most)
    packing = Packing(pack_lengths([num_tokens]))
    some = Labels(torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens), [0])
    blocks = Blocks.sampled(packing, some, OPTIONS["dflash"], BLOCK_SIZE)
    num_rows, generator = len(blocks.anchors) * BLOCK_SIZE, torch.Generator().manual_seed(1)
    sizes = [(num_rows, heads, 4), (num_tokens, 1, 4), (num_tokens, 1, 4), (num_rows, 1, 4), (num_rows, 1, 4)]
    query, *others = [drawn(generator, *size).requires_grad_() for size in sizes]
    with LargestTensor() as largest:
        attend_blocks(query, KeyValues(*others[:2]), KeyValues(*others[2:]), blocks, 0.5).sum().backward()
    assert num_rows * heads * num_tokens > 10 * most
    assert largest.size <= most


def test_anchors_are_random_weighted_tokens_by_seed_and_number() -> None:
    weights = np.array([0.0, 1.0, 0.5, 0.0, -1.0, 1.0, 1.0, 0.0, 1.0])
    candidates = {1, 2, 4, 5, 6, 8}
    assert sample_anchors(weights, TokenRandom(1, 0), 512).tolist() == sorted(candidates)
    found = [tuple(sample_anchors(weights, TokenRandom(seed, 4), 3).tolist()) for seed in range(-100, 100)]
    assert all(len(set(each)) == 3 and list(each) == sorted(each) and candidates >= set(each) for each in found)
    assert found[100] == tuple(sample_anchors(weights, TokenRandom(0, 4), 3).tolist())
    assert TokenRandom(0, 4).drawn(9)[:5].tolist() == TokenRandom(0, 4).drawn(5).tolist()
    # All 20 choices of 3 out of 6 turn up, and each candidate in about half of them.
    assert len(set(found)) == 20
    assert all(70 < sum(each in choice for choice in found) < 130 for each in candidates)


def test_anchors_depend_on_seed_and_number_not_on_the_batch() -> None:
    def anchors_of(packed: Sequence[TargetSequence], seed: int = 3) -> dict[int, list[int]]:
        options = {"num_anchors": 3, "seed": seed}
        blocks = Blocks.sampled(CASE.inputs(packed).packing, labels(packed), options, BLOCK_SIZE)
        starts = np.cumsum([0, *(len(each.weights) for each in packed)])
        found: dict[int, list[int]] = {each.number: [] for each in packed}
        for anchor in blocks.anchors.tolist():
            at = int(np.searchsorted(starts, anchor, side="right")) - 1
            found[packed[at].number].append(anchor - int(starts[at]))
        return found

    packed = target_sequences(CASE, (20, 4, 20, 30))
    whole = anchors_of(packed)
    assert all(len(each) <= 3 for each in whole.values())
    assert anchors_of(packed[::-1]) == whole
    assert {each.number: anchors_of([each])[each.number] for each in packed} == whole
    assert anchors_of(packed, seed=4) != whole
    same = [replace(packed[0], number=number) for number in (0, 1)]
    assert anchors_of(same)[0] != anchors_of(same)[1]


def scores_of(entropies: Sequence[float], exists: Sequence[float]) -> DraftScores:
    """Returns the scores of one block."""
    cross_entropy, real = (torch.tensor([each], dtype=torch.float64) for each in (entropies, exists))
    acceptance, correct = (-cross_entropy).exp() * real, (cross_entropy < 0.5) * real
    return DraftScores(
        cross_entropy.requires_grad_(), acceptance, correct, real, real, correct.cumprod(1), acceptance.cumprod(1)
    )


@pytest.mark.parametrize("objective", DFLASH.choices["objective"])
@pytest.mark.parametrize(
    ("weights", "exists"),
    [
        ((1, 1, 1, 1), (1, 1, 1, 1)),
        ((1, 0, 0.5, 1), (1, 1, 1, 1)),
        ((1, 1, 1, 1), (1, 1, 0, 0)),
        ((2, 0, 0, 0), (1,) * 4),
    ],
)
def test_loss_follows_its_formula(objective: str, weights: tuple[float, ...], exists: tuple[int, ...]) -> None:
    """A draft token that does not count changes nothing, even if it is NaN."""
    options = {**OPTIONS["dflash"], "objective": objective, "gamma": 3.0, "alpha": 0.4}
    entropies, counted = (0.3, 1.7, 0.9, 2.5), [weight * each for weight, each in zip(weights, exists, strict=True)]
    scores = scores_of([e if c else float("nan") for e, c in zip(entropies, counted, strict=True)], exists)
    output = DFLASH.function(scores, {"weights": torch.tensor([weights], dtype=torch.float64)}, options)
    factors = dflash_factors(entropies, counted, options)
    (gradient,) = torch.autograd.grad(output.losses.sum(), scores.cross_entropy)
    assert gradient.tolist() == [pytest.approx(factors)]
    assert output.losses.tolist() == [pytest.approx([f * e for f, e in zip(factors, entropies, strict=True)])]
    assert output.denominator is not None
    assert float(output.denominator) == pytest.approx(dflash_denominator(counted, options))
    for k, each in enumerate(counted, 1):
        assert float(output.ratios[f"accuracy/{k}"][1]) == (each != 0)


def test_dpace_loss_equals_a_hand_computed_value() -> None:
    """Computed by hand: for q = 1, 1/2, 1/4 and alpha 1/2 the products are 1, 3/4, 15/32."""
    scores = scores_of([float(-np.log(q)) for q in (1, 0.5, 0.25)], (1, 1, 1))
    output = DFLASH.function(scores, {"weights": torch.ones(1, 3)}, {**OPTIONS["dflash"], "objective": "dpace"})
    expected = [(3 / 4 + 15 / 32) * np.log(2), 15 / 32 * np.log(4)]
    assert output.losses.tolist() == [pytest.approx([0.0, *expected])]

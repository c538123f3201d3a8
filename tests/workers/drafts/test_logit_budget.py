"""Logits are scored in chunks: bounded memory for large vocabularies, and the same numbers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from trainhouse.schemas.models import DraftConfig
from trainhouse.workers.drafts.algorithms.algorithm import DraftPass
from trainhouse.workers.drafts.algorithms.dflash import DFlash
from trainhouse.workers.drafts.algorithms.draft_shape import DraftShape
from trainhouse.workers.drafts.algorithms.eagle3 import Eagle3
from trainhouse.workers.drafts.algorithms.logit_budget import LogitBudget
from trainhouse.workers.losses.draft_scores import DraftGradients
from transformers import LlamaConfig

from ..parallel.live_bytes import LiveBytes
from .eagle3_case import HIDDEN, learnable, packed, some_case, trained
from .naive_eagle3 import FIELDS

DEPTH, LENGTHS = 3, (70, 30)
BUDGET, UNLIMITED = 1 << 20, 1 << 40
VOCABULARIES = (512, 8192, 65536)
TENSORS = 6


def peak(draft_pass: DraftPass) -> int:
    """Returns the most bytes that scoring all rows takes, forward and backward, with gradients by acceptance too."""
    with LiveBytes() as live:
        for start in range(0, draft_pass.num_rows, draft_pass.chunk_rows):
            scores = draft_pass.scores(slice(start, min(start + draft_pass.chunk_rows, draft_pass.num_rows)))
            draft_pass.backward(DraftGradients(torch.ones_like(scores.acceptance), torch.ones_like(scores.acceptance)))
            del scores
    return live.peak


def eagle3(vocabulary: Sequence[int], target_vocabulary: int, budget: LogitBudget) -> DraftPass:
    case = some_case(vocabulary=vocabulary, target_vocabulary=target_vocabulary)
    parameters, _ = learnable(case.parameters, torch.float32)
    features, labels = packed(case.sequences(LENGTHS), torch.float32)
    inputs = replace(features, logits=lambda rows: features.logits(rows).clone())
    return (
        Eagle3()
        .network(case.shape, parameters, case.vocabulary)
        .training_pass(inputs, labels, {"ttt_length": DEPTH}, budget)
    )


class Head:
    """Stands in for TargetHead."""

    def __init__(self, vocabulary: int) -> None:
        self._weight = torch.randn(vocabulary, HIDDEN)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._weight.t()

    def backward(self, gradient: Tensor) -> Tensor:
        return gradient @ self._weight


def dflash(vocabulary: int, budget: LogitBudget) -> DraftPass:
    target = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=8, num_attention_heads=4, vocab_size=vocabulary
    )
    config = DFlash().with_defaults(DraftConfig(algorithm="dflash", block_size=DEPTH + 1), target, vocabulary)
    shape = DraftShape.of(config, target, vocabulary)
    parameters, _ = learnable({each.key: torch.randn(each.shape) for each in DFlash().parameters(shape)}, torch.float32)
    case = some_case()
    features, labels = packed(case.sequences(LENGTHS), torch.float32)
    inputs = replace(
        features,
        captured=torch.randn(sum(LENGTHS), shape.captured * HIDDEN),
        mask=torch.randn(HIDDEN),
        head=Head(vocabulary),
    )
    options = {"num_anchors": 50.0, "seed": 1.0}
    return DFlash().network(shape, parameters, torch.arange(vocabulary)).training_pass(inputs, labels, options, budget)


PASSES = {
    "eagle3": lambda size, budget: eagle3(range(size), size, budget),
    "eagle3, pruned": lambda size, budget: eagle3(range(0, size, size // 256), size, budget),
    "dflash": dflash,
}


@pytest.mark.parametrize("name", PASSES)
def test_logits_memory_does_not_grow_with_the_vocabulary(name: str) -> None:
    for size in VOCABULARIES:
        assert peak(PASSES[name](size, LogitBudget(512, BUDGET))) < TENSORS * BUDGET, size
    assert peak(PASSES[name](VOCABULARIES[-1], LogitBudget(512, UNLIMITED))) > 3 * TENSORS * BUDGET


def test_chunk_rows_follow_the_vocabulary_and_the_budget() -> None:
    assert eagle3(range(512), 512, LogitBudget(60, BUDGET)).chunk_rows == 60 // DEPTH
    assert eagle3(range(8192), 8192, LogitBudget(60, BUDGET)).chunk_rows == BUDGET // (4 * 8192 * DEPTH)
    assert eagle3(range(512), 65536, LogitBudget(60, BUDGET)).chunk_rows == BUDGET // (4 * 65536), (
        "the teacher's logits take most"
    )
    assert eagle3(range(8192), 8192, LogitBudget(60, 1)).chunk_rows == 1, "at least one row"


@pytest.mark.parametrize("vocabulary", [range(300), range(0, 300, 7)], ids=["all", "pruned"])
def test_chunked_scores_equal_scoring_all_rows_at_once(vocabulary: Sequence[int]) -> None:
    """Compares losses, metrics and gradients, in float64."""
    case = some_case(vocabulary=vocabulary, target_vocabulary=300)
    sequences = case.sequences((9, 1, 14))
    whole = trained(case, sequences, DEPTH, LogitBudget(10_000, UNLIMITED))
    for num_rows in (1, 2, 5):
        found = trained(case, sequences, DEPTH, LogitBudget(10_000, 4 * num_rows * max(300, DEPTH * len(vocabulary))))
        differences = found.differences(whole)
        assert differences.keys() >= {"loss", *FIELDS, *case.parameters} and max(differences.values()) < 1e-9
    shifted = [replace(each, logits=each.logits + 1e-6 * torch.arange(300)) for each in sequences]
    moved = trained(case, shifted, DEPTH, LogitBudget(10_000, 1)).differences(whole)
    assert min(moved[name] for name in ("loss", "cross_entropy", "acceptance", "lm_head.weight")) > 1e-8

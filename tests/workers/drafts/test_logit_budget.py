"""Logits are scored in chunks, so that their memory does not grow with the vocabulary."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from trainhouse.workers.drafts.algorithms.algorithm import DraftPass, chunks
from trainhouse.workers.drafts.losses.draft_scores import DraftGradients
from trainhouse.workers.drafts.sequences.target_form import TargetForm, target_form
from trainhouse.workers.shapes.logit_budget import LogitBudget

from ..parallel.live_bytes import LiveBytes
from .case import HIDDEN, joined, labels, learnable, new_case, target_sequences

LENGTHS = (70, 30)
BUDGET, UNLIMITED = 1 << 20, 1 << 40
SIZES = (512, 8192, 65536)
TENSORS = 6


def new_pass(
    name: Any, vocabulary: Sequence[int], size: int, budget: LogitBudget, form: TargetForm | None = None
) -> DraftPass:
    """Returns a pass in which the target's distribution does not exist before it is needed. `form`: in which it is
    read, None = all logits."""
    case = new_case(name, vocabulary, size, num_anchors=50)
    sequences = [replace(each, weights=torch.ones_like(each.weights)) for each in target_sequences(case, LENGTHS)]
    parameters, _ = learnable(case.parameters, torch.float32)
    inputs = case.inputs(sequences, torch.float32)
    if form is not None:
        logits = joined(sequences, "logits").float()
        inputs = replace(inputs, distribution=lambda rows: form.distribution(form.kept(logits[rows])))
    return case.network(parameters).training_pass(inputs, labels(sequences, torch.float32), case.options, budget)


def peak(draft_pass: DraftPass) -> int:
    """Returns the most bytes that scoring all rows takes, forward and backward, with gradients by acceptance too."""
    with LiveBytes() as live:
        for rows in chunks(draft_pass.num_rows, draft_pass.chunk_rows):
            scores = draft_pass.scores(rows)
            draft_pass.backward(DraftGradients(torch.ones_like(scores.acceptance), torch.ones_like(scores.acceptance)))
            del scores
    return live.peak


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "eagle3, pruned", "eagle3, pruned logits", "eagle3, top logits", "dflash"])
def test_logits_memory_does_not_grow_with_the_vocabulary(name: str) -> None:
    def peak_of(size: int, max_bytes: int) -> int:
        vocabulary = range(0, size, size // 256 if "pruned" in name else 1)
        top_k = 64 if "top" in name else None
        form = target_form("pruned_logits", top_k, HIDDEN, size, torch.tensor(vocabulary), None)
        form = form if "logits" in name else None
        return peak(new_pass(name.split(",")[0], vocabulary, size, LogitBudget(512, max_bytes), form))

    for size in SIZES:
        assert peak_of(size, BUDGET) < TENSORS * BUDGET, size
    assert peak_of(SIZES[-1], UNLIMITED) > 3 * TENSORS * BUDGET


@pytest.mark.parametrize(
    ("vocabulary", "size", "budget", "chunk_rows"),
    [
        (512, 512, LogitBudget(60, BUDGET), 60 // 3),
        (8192, 8192, LogitBudget(60, BUDGET), BUDGET // (4 * 8192 * 3)),
        (512, 65536, LogitBudget(60, BUDGET), BUDGET // (4 * 65536)),
        (8192, 8192, LogitBudget(60, 1), 1),
    ],
    ids=["draft tokens", "draft's logits", "target's logits", "at least one row"],
)
def test_chunk_rows_follow_the_vocabulary_and_the_budget(
    vocabulary: int, size: int, budget: LogitBudget, chunk_rows: int
) -> None:
    assert new_pass("eagle3", range(vocabulary), size, budget).chunk_rows == chunk_rows

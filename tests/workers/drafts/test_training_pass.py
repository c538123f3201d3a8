"""A training pass over packed sequences equals drafting one token or block at a time, for each algorithm and loss."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from trainhouse.workers.drafts.algorithms.algorithm import chunks
from trainhouse.workers.drafts.losses import DRAFT_LOSSES
from trainhouse.workers.drafts.losses.draft_scores import DraftGradients
from trainhouse.workers.drafts.sequences import block_attention
from trainhouse.workers.shapes.logit_budget import LogitBudget

from ..adapted import relative_error
from .case import (
    ALGORITHMS,
    FIELDS,
    SOME_TOKENS,
    VOCABULARY,
    Case,
    Head,
    TargetSequence,
    Trained,
    differentiated,
    learnable,
    new_case,
    sum_of,
    target_sequences,
    trained,
)
from .naive import WRONG, NaiveDraft, naively_trained

EXACT = 1e-9
CASES: dict[str, Case] = {
    "eagle3": new_case("eagle3"),
    "eagle3 of some tokens": new_case("eagle3", SOME_TOKENS),
    "dflash": new_case("dflash"),
    "dflash with few anchors": new_case("dflash", num_anchors=3, objective="dpace"),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_algorithm = pytest.mark.parametrize("case", [CASES[name] for name in ALGORITHMS], ids=ALGORITHMS)


@each_case
def test_pass_equals_naive_drafting(case: Case) -> None:
    sequences = target_sequences(case)
    found = trained(case, sequences)
    assert found.difference(naively_trained(case, sequences)) < EXACT
    assert all(gradient.any() for gradient in found.gradients.values())
    assert {float(each) for each in found.scores["correct"].values()} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *((name, {"kv_heads": kv_heads}) for name in ALGORITHMS for kv_heads in (1, 4)),
        *(("eagle3", {"ttt_length": depth}) for depth in (1, 7)),
    ],
)
def test_other_shapes_equal_naive_drafting(name: Any, fields: dict[str, Any]) -> None:
    case = new_case(name, **fields)
    assert trained(case, target_sequences(case)).difference(naively_trained(case, target_sequences(case))) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "wrong"),
    [(CASES[name], wrong) for name in ALGORITHMS for wrong in WRONG[name]],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_drafting_differs_in_scores_and_gradients(case: Case, wrong: type[NaiveDraft]) -> None:
    sequences = target_sequences(case)
    differences = trained(case, sequences).differences(naively_trained(case, sequences, wrong))
    assert min(differences[name] for name in ("totals", "cross_entropy", *case.parameters)) > 1e-5


@each_algorithm
def test_objectives_equal_their_formulas(case: Case) -> None:
    sequences, objectives = target_sequences(case), DRAFT_LOSSES[case.algorithm].choices["objective"]
    naive = {name: naively_trained(case.with_options(objective=name), sequences) for name in objectives}
    for name in objectives:
        found = trained(case.with_options(objective=name), sequences)
        assert found.difference(naive[name]) < EXACT
        for other in naive.keys() - {name}:
            assert min(found.differences(naive[other])[each] for each in ("totals", *case.parameters)) > 1e-3


PASSES: dict[str, Callable[[list[TargetSequence]], list[list[TargetSequence]]]] = {
    "backwards": lambda given: [given[::-1]],
    "equal lengths apart": lambda given: [[*given[:4], given[5], given[4]]],
    "each alone": lambda given: [[each] for each in given],
    "in two": lambda given: [given[:3], given[3:]],
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
@each_case
def test_gradients_are_sums_for_any_packing_and_micro_batches(
    case: Case, passes: Callable[..., Any], dtype: torch.dtype, tolerance: float
) -> None:
    sequences = target_sequences(case)
    whole = trained(case, sequences, dtype=dtype)
    parts = [trained(case, each, dtype=dtype) for each in passes(sequences)]
    assert sum_of(parts).difference(whole) < tolerance
    if len(parts) == 2:
        mean, mean_of_means = _mean(whole), [_mean(part) for part in parts]
        for name, each in mean.items():
            assert relative_error(torch.stack([one[name] for one in mean_of_means]).mean(0), each) > 1e-2


def _mean(found: Trained) -> dict[str, Tensor]:
    return {name: each / found.denominator for name, each in found.gradients.items()}


@pytest.mark.parametrize("chunk_rows", [1, 4, 7])
@each_case
def test_chunks_of_any_size_give_the_same(case: Case, chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention of blocks is chunked too."""
    sequences = target_sequences(case)
    whole = trained(case, sequences)
    monkeypatch.setattr(block_attention, "MAX_SCORES", chunk_rows * case.shape.heads * 4)
    num_logits = max(case.depth * case.shape.vocabulary, VOCABULARY)
    for budget in (LogitBudget(chunk_rows * case.depth), LogitBudget(10_000, 4 * chunk_rows * num_logits)):
        assert case.new_pass(case.parameters, sequences, budget).chunk_rows == chunk_rows
        assert trained(case, sequences, budget).difference(whole) < 1e-12


@each_algorithm
def test_nan_in_one_sequence_does_not_reach_others(case: Case) -> None:
    sequences = target_sequences(case)
    broken = [*sequences]
    broken[3] = replace(sequences[3], captured=torch.full_like(sequences[3].captured, torch.nan))
    right, found = (trained(case, each).scores for each in (sequences, broken))
    for name in FIELDS:
        others = {key: each for key, each in found[name].items() if key[0] != 3}
        assert others and all(torch.equal(each, right[name][key]) for key, each in others.items())
    assert any(each.isnan() for each in found["cross_entropy"].values())


@each_algorithm
def test_without_weights_there_are_no_rows_and_no_gradient(case: Case) -> None:
    unweighted = [replace(each, weights=torch.zeros_like(each.weights)) for each in target_sequences(case)]
    parameters, gradients = learnable(case.parameters, torch.float64)
    draft_pass = case.new_pass(parameters, unweighted)
    assert draft_pass.num_rows == 0
    draft_pass.close()
    assert not any(gradient.any() for gradient in gradients.values())


@each_case
def test_pass_without_gradients_gives_the_same_scores(case: Case) -> None:
    sequences = target_sequences(case)
    parameters, _ = learnable(case.parameters, torch.float64)
    plain, learning = (case.new_pass(each, sequences) for each in (case.parameters, parameters))
    for rows in chunks(plain.num_rows, 5):
        found, wanted = plain.scores(rows), learning.scores(rows)
        assert all(torch.equal(getattr(found, name), getattr(wanted, name)) for name in FIELDS)


@pytest.mark.parametrize("name", ["cross_entropy", "acceptance"])
@each_algorithm
def test_draft_tokens_that_do_not_exist_have_no_gradient(case: Case, name: str) -> None:
    sequences, found = target_sequences(case), []
    for only_existing in (False, True):
        parameters, gradients = learnable(case.parameters, torch.float64)
        draft_pass = case.new_pass(parameters, sequences)
        scores = draft_pass.scores(slice(0, draft_pass.num_rows))
        given = scores.exists if only_existing else torch.ones_like(scores.exists)
        assert not scores.exists.all()
        draft_pass.backward(replace(DraftGradients(0 * given, 0 * given), **{name: given}))
        draft_pass.close()
        found.append(gradients)
    assert all(torch.equal(each, found[1][name]) and each.any() for name, each in found[0].items())


@pytest.mark.parametrize("objective", DRAFT_LOSSES["dflash"].choices["objective"])
def test_uncounted_draft_tokens_have_no_gradient_even_with_nan_logits(objective: str) -> None:
    case = CASES["dflash"].with_options(objective=objective)
    sequences = target_sequences(case)
    draft_pass = case.new_pass(case.parameters, sequences)
    wrong = (draft_pass.weights(slice(0, draft_pass.num_rows)) == 0).flatten()
    assert wrong.any() and isinstance(case.head, Head)
    head = Head(case.head.weight, wrong)
    found = trained(case, sequences, change=lambda inputs: replace(inputs, head=head))
    wanted = trained(case, sequences)
    assert all(relative_error(found.gradients[name], each) < 1e-12 for name, each in wanted.gradients.items())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-2)], ids=str)
@each_algorithm
def test_scores_and_gradients_are_float32_for_any_weight_dtype(
    case: Case, dtype: torch.dtype, tolerance: float
) -> None:
    """Compared with float64 over the same rounded weights and features."""
    sequences = target_sequences(case)
    found, wanted = trained(case, sequences, dtype=dtype), trained(*rounded(case, sequences, dtype))
    assert {each.dtype for each in found.gradients.values()} == {torch.float32}
    assert {score.dtype for of_field in found.scores.values() for score in of_field.values()} == {torch.float32}
    for name, gradient in found.gradients.items():
        error = relative_error(gradient.double(), wanted.gradients[name])
        assert error < tolerance < relative_error(gradient.double() * (1 + 2 * tolerance), wanted.gradients[name]), name


def rounded(case: Case, sequences: Sequence[TargetSequence], dtype: torch.dtype) -> tuple[Case, list[TargetSequence]]:
    def left(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    given = [replace(each, embedded=left(each.embedded), captured=left(each.captured)) for each in sequences]
    case = replace(case, parameters={name: left(each) for name, each in case.parameters.items()})
    head = Head(left(case.head.weight)) if isinstance(case.head, Head) else None
    return replace(case, head=head, embedding=left(case.embedding)), given


@each_algorithm
def test_gradients_accumulate_in_float32(case: Case) -> None:
    """Buffers in bfloat16 would lose small additions."""
    sequences, num_passes = target_sequences(case), 32
    once = trained(case, sequences, dtype=torch.bfloat16).gradients
    parameters, gradients = learnable(case.parameters, torch.bfloat16)
    narrow = {name: torch.zeros_like(each, dtype=torch.bfloat16) for name, each in once.items()}
    for _ in range(num_passes):
        differentiated(case, case.new_pass(parameters, sequences, dtype=torch.bfloat16), sequences, gradients)
        narrow = {name: each + once[name].bfloat16() for name, each in narrow.items()}
    for name, each in once.items():
        assert parameters[name].grad is gradients[name]
        assert relative_error(gradients[name], num_passes * each) < 1e-5
        assert relative_error(narrow[name].float(), num_passes * each) > 1e-3

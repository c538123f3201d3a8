"""EAGLE-3's unrolled training pass equals drafting from every token; its gradients are sums over sequences."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import DraftConfig
from trainhouse.workers.drafts.algorithms.draft_shape import DraftShape
from trainhouse.workers.drafts.algorithms.draft_token_chunk import TargetDistribution
from trainhouse.workers.drafts.algorithms.eagle3 import Eagle3
from trainhouse.workers.drafts.algorithms.logit_budget import LogitBudget
from trainhouse.workers.drafts.algorithms.modules import DraftModules, rotated
from trainhouse.workers.losses.draft_scores import DraftScores
from trainhouse.workers.losses.eagle3 import EAGLE3
from trainhouse.workers.parallel.mesh import ALONE
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from ...tiny import LLAMA3_ROPE, TINY_SHAPE, tiny_config
from ..adapted import Adapted, relative_error
from .eagle3_case import (
    TARGET_VOCABULARY,
    Case,
    TargetSequence,
    Trained,
    both,
    cross_entropy,
    learnable,
    naively_trained,
    packed,
    run,
    some_case,
    trained,
)
from .naive_eagle3 import FIELDS, NaiveDraft, Rollout

LENGTHS = (3, 1, 2, 7, 7, 12, 1)
DEPTH = 3
SOME_TOKENS = (0, 3, 4, 7, 9, 11)
EXACT = 1e-9
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.fixture(scope="module")
def case() -> Case:
    return some_case(vocabulary=SOME_TOKENS)


@pytest.fixture(scope="module")
def sequences(case: Case) -> list[TargetSequence]:
    return case.sequences(LENGTHS)


# Training equals drafting


@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("vocabulary", [range(TARGET_VOCABULARY), SOME_TOKENS])
def test_training_pass_equals_a_rollout_from_every_token(depth: int, kv_heads: int, vocabulary: Sequence[int]) -> None:
    case = some_case(kv_heads, vocabulary)
    sequences = case.sequences(LENGTHS)
    found = trained(case, sequences, depth, 5)
    wanted = naively_trained(case, sequences, depth)
    differences = found.differences(wanted)
    assert differences.keys() == {"loss", "states", *FIELDS, *case.parameters}
    assert max(differences.values()) < EXACT, differences
    assert all(gradient.any() for gradient in found.gradients.values())
    assert set(found.scores["greedy"][:, 0].tolist()) == {0.0, 1.0}


class FeaturesOfTheTokenBefore(Rollout):
    def feature(self, token: int) -> Tensor:
        return super().feature(max(0, token - 1))


class FeaturesOfTheNextToken(Rollout):
    """These are not known yet in drafting."""

    def feature(self, token: int) -> Tensor:
        return super().feature(min(token + 1, len(self.sequence) - 1))


class PositionsOfTheAnchor(Rollout):
    def position(self, guess: int) -> int:
        return self.anchor


class NoKeysOfEarlierGuesses(Rollout):
    def seen(self) -> tuple[Tensor, Tensor]:
        keys, values = super().seen()
        return keys[: self.anchor + 1], values[: self.anchor + 1]


@pytest.mark.parametrize("wrong", [FeaturesOfTheTokenBefore, FeaturesOfTheNextToken])
def test_wrong_features_change_losses_and_gradients(
    case: Case, sequences: list[TargetSequence], wrong: type[Rollout]
) -> None:
    differences = trained(case, sequences, DEPTH).differences(naively_trained(case, sequences, DEPTH, rollout=wrong))
    assert min(differences[name] for name in ("loss", "states", "cross_entropy", *case.parameters)) > 1e-4


@pytest.mark.parametrize("wrong", [PositionsOfTheAnchor, NoKeysOfEarlierGuesses])
def test_errors_after_the_first_guess_change_losses_and_gradients(
    case: Case, sequences: list[TargetSequence], wrong: type[Rollout]
) -> None:
    def differences(depth: int) -> dict[str, float]:
        return trained(case, sequences, depth).differences(naively_trained(case, sequences, depth, rollout=wrong))

    assert max(differences(1).values()) < EXACT
    deeper = differences(DEPTH)
    assert min(deeper[name] for name in ("loss", "states", "cross_entropy", *case.parameters)) > 1e-5


def kl(scores: DraftScores) -> Tensor:
    return scores.covered * scores.cross_entropy


def lk_alpha(scores: DraftScores) -> Tensor:
    logarithm = torch.where(scores.exists == 1, scores.acceptance, 1.0).log()
    return scores.covered * -logarithm


def lk_lambda(scores: DraftScores) -> Tensor:
    share = 0.9 * torch.exp(-2.0 * scores.acceptance.detach())
    return scores.covered * (share * scores.cross_entropy + (1 - share) * (1 - scores.acceptance))


OBJECTIVES = {"kl": kl, "lk_alpha": lk_alpha, "lk_lambda": lk_lambda}


@pytest.fixture(scope="module")
def by_formula(case: Case, sequences: list[TargetSequence]) -> dict[str, Trained]:
    return {name: naively_trained(case, sequences, DEPTH, objective=each) for name, each in OBJECTIVES.items()}


@pytest.mark.parametrize("name", EAGLE3.choices["objective"])
def test_objectives_equal_their_formulas_over_rollouts(
    case: Case, sequences: list[TargetSequence], by_formula: dict[str, Trained], name: str
) -> None:
    def ours(scores: DraftScores) -> Tensor:
        config = {"objective": name, "decay": 1.0, "lk_scale": 0.9, "lk_decay": 2.0}
        return EAGLE3.function(scores, {"weights": torch.ones_like(scores.acceptance)}, config).losses

    found = trained(case, sequences, DEPTH, objective=ours)
    differences = {each: found.differences(wanted) for each, wanted in by_formula.items()}
    assert max(differences.pop(name).values()) < EXACT
    for other in differences.values():
        assert min(other[each] for each in ("loss", *case.parameters)) > 1e-3


# Sums


def summed(parts: Sequence[Trained]) -> dict[str, Tensor]:
    return {name: torch.stack([part.gradients[name] for part in parts]).sum(0) for name in parts[0].gradients}


def largest_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(relative_error(found[name], each) for name, each in wanted.items())


Passes = Callable[[list[TargetSequence]], list[list[TargetSequence]]]
PASSES: dict[str, Passes] = {
    "the other way round": lambda given: [given[::-1]],
    "equal lengths apart": lambda given: [[*given[:4], given[5], given[4], given[6]]],
    "each alone": lambda given: [[each] for each in given],
    "in two": lambda given: [given[:3], given[3:]],
}
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])


@DTYPES
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES.keys())
def test_gradients_are_sums_for_any_packing(
    case: Case, sequences: list[TargetSequence], passes: Passes, dtype: torch.dtype, tolerance: float
) -> None:
    whole = trained(case, sequences, DEPTH, dtype=dtype)
    parts = [trained(case, each, DEPTH, dtype=dtype) for each in passes(sequences)]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=tolerance)
    assert largest_error(summed(parts), whole.gradients) < tolerance


@DTYPES
@pytest.mark.parametrize("chunk_rows", [1, 4, 17])
def test_gradients_do_not_depend_on_the_chunk_size(
    case: Case, sequences: list[TargetSequence], chunk_rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    whole = trained(case, sequences, DEPTH, dtype=dtype)
    found = trained(case, sequences, DEPTH, chunk_rows, dtype=dtype)
    assert largest_error(found.gradients, whole.gradients) < tolerance
    assert all(found.differences(whole)[name] < tolerance for name in FIELDS)


@DTYPES
def test_mean_of_passes_differs_from_the_overall_mean(
    case: Case, sequences: list[TargetSequence], dtype: torch.dtype, tolerance: float
) -> None:
    def mean(given: list[TargetSequence]) -> dict[str, Tensor]:
        found = trained(case, given, DEPTH, dtype=dtype)
        return {name: each / found.scores["exists"].sum() for name, each in found.gradients.items()}

    parts = [mean(each) for each in PASSES["in two"](sequences)]
    found = {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
    assert largest_error(found, mean(sequences)) > 0.01 > tolerance


def test_zero_weights_give_no_gradient(case: Case, sequences: list[TargetSequence]) -> None:
    given = [replace(each, weights=torch.zeros(len(each), dtype=torch.float64)) for each in sequences]
    found = trained(case, given, DEPTH)
    assert found.loss == 0
    assert not any(gradient.any() for gradient in found.gradients.values())


def test_weights_apply_to_the_guessed_token(case: Case, sequences: list[TargetSequence]) -> None:
    """The first two tokens of a sequence are never guessed, and the last one is the label of the last row."""
    given = sequences[3]
    for row, counts in ((0, False), (1, True), (len(given) - 1, True)):
        weights = torch.zeros(len(given), dtype=torch.float64)
        weights[row] = 1.0
        found = trained(case, [replace(given, weights=weights)], DEPTH)
        assert all(bool(gradient.any()) == counts for gradient in found.gradients.values())


@pytest.mark.parametrize("chunk_rows", [1, 7, 10_000])
def test_only_weighted_tokens_and_guesses_leading_there_are_scored(
    case: Case, sequences: list[TargetSequence], chunk_rows: int
) -> None:
    """Each sequence has an answer; only it and the guesses that must be right before it are scored."""
    answers = [slice(len(each) // 2, len(each) // 2 + 2) for each in sequences]
    given = [replace(each, weights=only(each.weights, answer)) for each, answer in zip(sequences, answers, strict=True)]
    of_all = torch.cat([each.weights for each in given])
    leading = {row - ahead for row in of_all.nonzero().flatten().tolist() for ahead in range(DEPTH)}
    parameters, _ = learnable(case.parameters, torch.float64)
    network = Eagle3().network(case.shape, parameters, case.vocabulary)
    draft = network.training_pass(*packed(given), {"ttt_length": float(DEPTH)}, LogitBudget(chunk_rows))
    places = draft.label_indices(slice(0, draft.num_rows))[:, 0]
    assert set(places.tolist()) == {row for row in leading if row >= 0} and draft.num_rows < len(of_all) / 1.5

    found, wanted = trained(case, given, DEPTH, chunk_rows), naively_trained(case, given, DEPTH)
    scores, counts = {name: wanted.scores[name][places] for name in FIELDS}, of_all[places] != 0
    assert abs(found.loss - wanted.loss) < EXACT and largest_error(found.gradients, wanted.gradients) < EXACT
    assert all((found.scores[name][counts] - scores[name][counts]).abs().max() < EXACT for name in FIELDS)
    assert not torch.equal(found.scores["sampled"][~counts], scores["sampled"][~counts]), (
        "guesses before these are missing"
    )


def only(weights: Tensor, rows: slice) -> Tensor:
    kept = torch.zeros_like(weights)
    kept[rows] = weights[rows]
    return kept


@pytest.mark.parametrize("objective", [both, cross_entropy])
def test_sequences_of_one_token_do_not_count(
    case: Case, sequences: list[TargetSequence], objective: Callable[..., Tensor]
) -> None:
    ones = case.sequences([1, 1, 1], seed=5)
    alone = trained(case, ones, DEPTH, objective=objective)
    assert alone.loss == 0
    assert not any(each.any() for each in (*alone.scores.values(), *alone.gradients.values()))
    without = trained(case, sequences, DEPTH, objective=objective)
    among = trained(case, [*ones, *sequences], DEPTH, objective=objective)
    assert largest_error(among.gradients, without.gradients) < 1e-12


def test_nan_in_one_sequence_does_not_reach_others(case: Case, sequences: list[TargetSequence]) -> None:
    broken = replace(sequences[3], captured=torch.full_like(sequences[3].captured, float("nan")))
    given = [*sequences[:3], broken, *sequences[4:]]
    sound = trained(case, sequences, DEPTH).scores
    found = trained(case, given, DEPTH).scores
    rows = slice(sum(LENGTHS[:3]), sum(LENGTHS[:4]))
    for name in FIELDS:
        assert torch.equal(found[name][: rows.start], sound[name][: rows.start])
        assert torch.equal(found[name][rows.stop :], sound[name][rows.stop :])
    assert found["cross_entropy"][rows].isnan().any()


def test_pass_without_gradients_gives_the_same_scores(case: Case, sequences: list[TargetSequence]) -> None:
    wanted = trained(case, sequences, DEPTH).scores
    network = Eagle3().network(case.shape, case.parameters, case.vocabulary)
    draft = network.training_pass(*packed(sequences), {"ttt_length": float(DEPTH)}, LogitBudget(10_000))
    rows = slice(0, draft.num_rows)
    scores = draft.scores(rows)
    assert all(torch.equal(getattr(scores, name), wanted[name]) for name in FIELDS)
    assert torch.equal(draft.label_indices(rows), torch.arange(sum(LENGTHS))[:, None].expand(-1, DEPTH))


# Distributions


@pytest.mark.parametrize("vocabulary", [range(TARGET_VOCABULARY), SOME_TOKENS])
@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_target_distributions_do_not_depend_on_the_chunk_size(vocabulary: Sequence[int], num_rows: int) -> None:
    logits = 3 * torch.randn(33, TARGET_VOCABULARY)
    parts = [TargetDistribution.of(some, torch.tensor(vocabulary)) for some in logits.split(num_rows)]
    whole = TargetDistribution.of(logits, torch.tensor(vocabulary))
    for name in ("restricted", "share", "top_token", "covered"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    exact = logits.double().softmax(-1)[:, list(vocabulary)]
    torch.testing.assert_close((whole.restricted * whole.share).double(), exact, rtol=1e-5, atol=1e-7)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(whole.restricted.double() * 0.999, exact, rtol=1e-5, atol=1e-7)


def test_ties_for_the_likeliest_token_go_to_the_first() -> None:
    logits = torch.zeros(5, TARGET_VOCABULARY)
    logits[:, 4:9] = 2.0
    assert TargetDistribution.of(logits, torch.tensor(SOME_TOKENS)).top_token.tolist() == [4] * 5


# Acceptance


def perfect(vocabulary: Sequence[int], length: int = 9) -> tuple[Case, TargetSequence]:
    """Returns a draft whose state never changes, and a target with the same features and logits everywhere: the draft's
    own logits, and a constant for tokens that the draft cannot predict.
    """
    case = some_case(vocabulary=vocabulary)
    nothing = {name: torch.zeros_like(case.parameters[name]) for name in case.parameters if _updates(name)}
    case = replace(case, parameters=dict(case.parameters) | nothing)
    (sequence,) = case.sequences([length])
    captured = sequence.captured[:1]
    shape = case.shape
    draft = NaiveDraft(case.parameters, case.vocabulary, shape.heads, shape.kv_heads, shape.head_dim, shape.eps)
    logits = torch.full((1, TARGET_VOCABULARY), -3.0, dtype=torch.float64)
    logits[0, case.vocabulary] = draft.guess(case.parameters["fc.weight"] @ captured[0]).log()
    return case, replace(sequence, captured=captured.repeat(length, 1), logits=logits.repeat(length, 1))


def _updates(name: str) -> bool:
    return "o_proj" in name or "down_proj" in name


def test_perfect_draft_is_always_accepted() -> None:
    case, given = perfect(range(TARGET_VOCABULARY))
    found = trained(case, [given], DEPTH, objective=cross_entropy)
    exists = found.scores["exists"]
    for name in ("acceptance", "correct", "covered", "greedy", "sampled"):
        torch.testing.assert_close(found.scores[name], exists, rtol=0, atol=1e-12)
    assert all(gradient.abs().max() < 1e-12 for gradient in found.gradients.values())
    for simulated in ("greedy", "sampled"):
        assert float((found.scores[simulated].sum(0) / exists.sum(0)).sum()) == pytest.approx(DEPTH)


def test_pruned_draft_is_accepted_with_the_targets_share_of_its_tokens() -> None:
    case, given = perfect(SOME_TOKENS)
    scores = trained(case, [given], DEPTH).scores
    share = float(given.logits[0].softmax(0)[list(SOME_TOKENS)].sum())
    assert 0.1 < share < 0.9
    for guess in range(DEPTH):
        rows = scores["exists"][:, guess] == 1
        torch.testing.assert_close(scores["acceptance"][rows, guess], torch.full_like(scores["exists"][rows, 0], share))
        sampled = scores["sampled"][rows, guess]
        torch.testing.assert_close(sampled, torch.full_like(sampled, share ** (guess + 1)))


@pytest.mark.parametrize("chunk_rows", [1, 10_000])
def test_guesses_after_a_wrong_one_are_not_accepted(chunk_rows: int) -> None:
    case, given = perfect(range(TARGET_VOCABULARY))
    wrong, logits = 4, given.logits.clone()
    logits[wrong] *= -1.0
    found = trained(case, [replace(given, logits=logits)], DEPTH, chunk_rows).scores
    for row in range(len(given)):
        for guess in range(min(row, DEPTH)):
            assert found["correct"][row, guess] == float(row != wrong)
            # Earlier guesses from the same anchor were for the rows up to this one.
            assert found["greedy"][row, guess] == float(wrong not in range(row - guess, row + 1))
            assert (found["sampled"][row, guess] < 1 - 1e-6) == (wrong in range(row - guess, row + 1))


# Lower precision, and new drafts


def rounded(case: Case, sequences: Sequence[TargetSequence], dtype: torch.dtype) -> tuple[Case, list[TargetSequence]]:
    """Rounds weights and features to this type, in float64."""

    def left(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    given = [replace(each, embedded=left(each.embedded), captured=left(each.captured)) for each in sequences]
    return replace(case, parameters={name: left(each) for name, each in case.parameters.items()}), given


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-2)])
def test_gradients_are_float32_for_any_weight_dtype(
    case: Case, sequences: list[TargetSequence], dtype: torch.dtype, tolerance: float
) -> None:
    found = trained(case, sequences, DEPTH, dtype=dtype)
    wanted = trained(*rounded(case, sequences, dtype), DEPTH)
    assert {gradient.dtype for gradient in found.gradients.values()} == {torch.float32}
    assert {score.dtype for score in found.scores.values()} == {torch.float32}
    for name, gradient in found.gradients.items():
        other = wanted.gradients[name]
        error = relative_error(gradient.double(), other)
        assert error < tolerance < relative_error(gradient.double() * (1 + 2 * tolerance), other), name


def test_gradients_accumulate_in_float32(case: Case, sequences: list[TargetSequence]) -> None:
    """Buffers in bfloat16 would lose small additions."""
    once = trained(case, sequences, DEPTH, dtype=torch.bfloat16).gradients
    parameters, gradients = learnable(case.parameters, torch.bfloat16)
    network = Eagle3().network(case.shape, parameters, case.vocabulary)
    features, labels = packed(sequences, torch.bfloat16)
    num_passes, narrow = 32, {name: each.bfloat16() for name, each in once.items()}
    for _ in range(num_passes):
        run(network.training_pass(features, labels, {"ttt_length": float(DEPTH)}, LogitBudget(10_000)), both)
    for _ in range(num_passes - 1):
        narrow = {name: each + once[name].bfloat16() for name, each in narrow.items()}
    wanted = {name: num_passes * each for name, each in once.items()}
    assert largest_error(gradients, wanted) < 1e-5
    assert all(parameters[name].grad is each for name, each in gradients.items())
    assert all(relative_error(narrow[name].float(), each) > 1e-3 for name, each in wanted.items())


def test_new_draft_depends_on_its_seed_and_copies_the_targets_head(tiny_models: dict[str, Path]) -> None:
    base = Adapted(tiny_models["llama"]).base
    requested = DraftConfig(algorithm="eagle3", draft_vocab_size=100)
    parameters = Eagle3().parameters(
        DraftShape.of(Eagle3().with_defaults(requested, base.config, 512), base.config, 512)
    )
    vocabulary = torch.arange(3, 303, 3)

    def new(seed: int) -> dict[str, Tensor]:
        tensors = {each.key: torch.zeros(each.shape) for each in parameters}
        Eagle3().initialize(tensors, base, vocabulary, torch.Generator().manual_seed(seed))
        return tensors

    first, again, other = new(1), new(1), new(2)
    assert torch.equal(first["lm_head.weight"], base.unembedding[vocabulary])
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight))
        elif name != "lm_head.weight":
            assert not torch.equal(weight, other[name])
            assert float(weight.square().sum(1).mean()) == pytest.approx(1.0, rel=0.1)


# Refused configs, and defaults


def target(**fields: Any) -> LlamaConfig:
    return LlamaConfig(**(TINY_SHAPE | fields))


@pytest.mark.parametrize(
    ("num_layers", "captured"),
    [(1, (0,)), (2, (0, 1)), (4, (0, 1)), (8, (1, 3, 4)), (32, (1, 15, 28)), (36, (1, 17, 32))],
)
def test_default_capture_layers_are_near_start_middle_and_end(num_layers: int, captured: tuple[int, ...]) -> None:
    found = Eagle3().with_defaults(DraftConfig(algorithm="eagle3"), target(num_hidden_layers=num_layers), 512)
    assert found == DraftConfig(
        algorithm="eagle3", num_layers=1, capture_layers=captured, draft_vocab_size=512, intermediate_size=128
    )


def test_explicit_settings_are_kept() -> None:
    requested = DraftConfig(
        algorithm="eagle3", num_layers=1, capture_layers=(0, 5), draft_vocab_size=9, intermediate_size=7, seed=3
    )
    assert Eagle3().with_defaults(requested, target(num_hidden_layers=8), 512) == requested


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 2}, "num_layers is 2: an eagle3 draft has 1 layer"),
        ({"block_size": 8}, "block_size is a setting of dflash, not of eagle3: leave it out"),
        ({"mask_token_id": 0}, "mask_token_id is a setting of dflash, not of eagle3: leave it out"),
        ({"capture_layers": (1, 8)}, "capture_layers has 8: the target has layers 0 to 7, counted from 0"),
        (
            {"draft_vocab_size": 513},
            "draft_vocab_size 513 exceeds the target's vocabulary of 512: lower it",
        ),
    ],
)
def test_impossible_draft_configs_are_refused(fields: dict[str, object], message: str) -> None:
    requested = DraftConfig.model_validate({"algorithm": "eagle3"} | fields)
    with pytest.raises(OperationError) as refusal:
        Eagle3().with_defaults(requested, target(num_hidden_layers=8), 512)
    assert str(refusal.value) == message


@pytest.mark.parametrize("rope", [None, LLAMA3_ROPE, YARN])
def test_heads_use_the_targets_rotary_embedding(rope: dict[str, object] | None) -> None:
    config = target(**({"rope_parameters": rope} if rope else {}))
    resolved = Eagle3().with_defaults(DraftConfig(algorithm="eagle3"), config, 512)
    shape, positions = DraftShape.of(resolved, config, 512), torch.tensor([0, 1, 7, 800])
    heads = torch.randn(len(positions), 3, shape.head_dim)
    modules = DraftModules(shape, {}, ALONE)
    found = rotated(heads, *modules.cos_sin(positions, heads.dtype))
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    wanted = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)[0]
    torch.testing.assert_close(found, wanted[0].transpose(0, 1), rtol=0, atol=1e-6)
    later = rotated(heads, *modules.cos_sin(positions + 1, heads.dtype))
    assert not torch.allclose(later, found, rtol=0, atol=1e-2)


def test_heads_are_rotated_fully_if_the_target_rotates_partially() -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.5] * 6, "long_factor": [2.0] * 6, "factor": 4.0}
    longrope = factors | {"rope_theta": 10000.0, "original_max_position_embeddings": 256}
    for rope in (longrope, {"rope_type": "default", "rope_theta": 10000.0}):
        config = tiny_config("phi3", rope_parameters=rope | {"partial_rotary_factor": 0.75})
        shape = DraftShape.of(Eagle3().with_defaults(DraftConfig(algorithm="eagle3"), config, 512), config, 512)
        frequencies, scale = shape.rotation(torch.device("cpu"))
        assert (len(frequencies), scale) == (shape.head_dim // 2, 1.0)
        assert not getattr(shape.config, "partial_rotary_factor", None)
        assert shape.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}

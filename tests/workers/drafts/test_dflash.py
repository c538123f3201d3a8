"""DFlash training over packed sequences equals one block at a time: training matches drafting."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import DraftConfig
from trainhouse.workers.drafts.algorithms.dflash import DFlash, DFlashNetwork
from trainhouse.workers.drafts.algorithms.draft_shape import DraftShape
from trainhouse.workers.drafts.algorithms.logit_budget import LogitBudget
from trainhouse.workers.drafts.sequences import block_attention
from trainhouse.workers.drafts.sequences.block_attention import KeyValues, attend_blocks
from trainhouse.workers.drafts.sequences.blocks import Blocks, TokenRandom, sample_anchors
from trainhouse.workers.drafts.sequences.features import DraftInputs
from trainhouse.workers.drafts.sequences.labels import Labels, Options
from trainhouse.workers.drafts.sequences.sequence_shard import SequenceShard
from trainhouse.workers.losses.dflash import DFLASH
from trainhouse.workers.losses.draft_scores import DraftGradients, DraftScores
from trainhouse.workers.ops.attention import Packing, pack_lengths

from ...tiny import tiny_config
from .naive_dflash import NaiveDraft, NaiveLoss

VOCABULARY, MASK, SIZE, LAYERS = 23, 5, 4, 2
TARGET = tiny_config(
    "qwen3",
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=9,
    head_dim=8,
    vocab_size=VOCABULARY,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
CONFIG = DFlash().with_defaults(
    DraftConfig(algorithm="dflash", num_layers=LAYERS, block_size=SIZE, mask_token_id=MASK), TARGET, VOCABULARY
)
SHAPE = DraftShape.of(CONFIG, TARGET, VOCABULARY)
OPTIONS: Options = {"gamma": 7.0, "alpha": 0.5, "num_anchors": 512, "seed": 3, "objective": "ce"}
DPACE = {**OPTIONS, "objective": "dpace"}
LENGTHS = (7, 1, 9, 9, 5)
NOTHING = torch.empty(0)
each_objective = pytest.mark.parametrize("options", [OPTIONS, DPACE], ids=["ce", "dpace"])


@dataclass(frozen=True, eq=False)
class Sample:
    """A sequence of T tokens and the next one: tokens [T + 1]; captured [T, ...]; weights [T], of each next token."""

    tokens: Tensor
    captured: Tensor
    weights: Tensor
    number: int


@dataclass(frozen=True, eq=False)
class Head:
    """Stands in for TargetHead. wrong: rows whose logits are NaN."""

    weight: Tensor
    wrong: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.weight.t()
        return logits if self.wrong is None else logits.masked_fill(self.wrong[:, None], torch.nan)

    def backward(self, gradient: Tensor) -> Tensor:
        return gradient.to(self.weight.dtype) @ self.weight


@dataclass(frozen=True, eq=False)
class Result:
    """cross_entropy: by (sequence, anchor)."""

    loss: Tensor
    denominator: Tensor
    gradients: Mapping[str, Tensor]
    cross_entropy: Mapping[tuple[int, int], Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EMBEDDING, HEAD = drawn(VOCABULARY, SHAPE.hidden, seed=1), Head(drawn(VOCABULARY, SHAPE.hidden, seed=2) / 4)


def samples(lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    """Some tokens have weight 0, some 0.5."""
    generator = torch.Generator().manual_seed(7)
    return [
        Sample(
            torch.randint(VOCABULARY, (length + 1,), generator=generator),
            drawn(length, SHAPE.captured * SHAPE.hidden, seed=number),
            torch.tensor([0.0, 0.5, 1.0, 1.0])[torch.randint(4, (length,), generator=generator)],
            number,
        )
        for number, length in enumerate(lengths)
    ]


def new_weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Norms differ from 1, so that a missing one shows."""
    generator = torch.Generator().manual_seed(11)
    weights = {each.key: torch.empty(each.shape, dtype=torch.float64) for each in DFlash().parameters(SHAPE)}
    DFlash().initialize(weights, None, NOTHING, generator)  # pyright: ignore[reportArgumentType]
    for number, weight in enumerate(weights.values()):
        if weight.ndim == 1:
            weight.add_(drawn(*weight.shape, seed=number) / 5)
    return {name: weight.to(dtype).requires_grad_() for name, weight in weights.items()}


def network(weights: Mapping[str, Tensor], size: int = SIZE) -> DFlashNetwork:
    return DFlash().network(replace(SHAPE, block_size=size), weights, NOTHING)


def features(packed: Sequence[Sample], dtype: torch.dtype = torch.float64) -> DraftInputs:
    lengths = [len(each.weights) for each in packed]
    return DraftInputs(
        positions=torch.cat([torch.arange(length) for length in lengths]),
        packing=Packing(pack_lengths(lengths)),
        embedded=torch.cat([EMBEDDING[each.tokens[:-1]] for each in packed]).to(dtype),
        captured=torch.cat([each.captured for each in packed]).to(dtype),
        logits=no_logits,
        shard=SequenceShard(sum(lengths)),
        mask=EMBEDDING[MASK].to(dtype),
        head=Head(HEAD.weight.to(dtype)),
    )


def no_logits(rows: slice) -> Tensor:
    raise AssertionError("DFlash must not read the target's logits")


def labels(packed: Sequence[Sample]) -> Labels:
    targets = torch.cat([each.tokens[1:] for each in packed])
    return Labels(targets, torch.cat([each.weights for each in packed]), [each.number for each in packed])


def trained(
    weights: Mapping[str, Tensor],
    batches: Sequence[Sequence[Sample]],
    options: Options = OPTIONS,
    chunk_rows: int = 1000,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """Makes one pass after the other, like a worker over micro-batches."""
    loss = denominator = torch.zeros(())
    cross_entropy: dict[tuple[int, int], Tensor] = {}
    for weight in weights.values():
        weight.grad = None
    for packed in batches:
        draft_pass = network(weights).training_pass(
            features(packed, dtype), labels(packed), options, LogitBudget(chunk_rows)
        )
        names = [(each.number, at) for each in packed for at in range(len(each.weights))]
        for start in range(0, draft_pass.num_rows, draft_pass.chunk_rows):
            rows = slice(start, min(start + draft_pass.chunk_rows, draft_pass.num_rows))
            scores, leaves = draft_pass.scores(rows).leaves()
            output = DFLASH.function(scores, {"weights": draft_pass.weights(rows)}, options)
            assert output.denominator is not None
            draft_pass.backward(DraftGradients.of(output.losses, leaves))
            loss, denominator = loss + output.losses.detach().sum(), denominator + output.denominator
            anchors = draft_pass.label_indices(rows)[:, 0].tolist()
            cross_entropy |= dict(zip([names[at] for at in anchors], leaves[0].detach(), strict=True))
        draft_pass.close()
    gradients = {name: grad.clone() for name, weight in weights.items() if (grad := weight.grad) is not None}
    assert gradients.keys() == weights.keys()
    return Result(loss, denominator, gradients, cross_entropy)


def naive(weights: Mapping[str, Tensor]) -> NaiveDraft:
    return NaiveDraft(weights, LAYERS, SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim, SHAPE.eps, theta=10000.0)


def naive_block(draft: NaiveDraft, sample: Sample, anchor: int, leak: int = 0) -> list[Tensor]:
    """leak: number of tokens too many that it sees."""
    captured = sample.captured[: anchor + leak]
    return draft.guesses(captured, anchor, EMBEDDING[sample.tokens[anchor]], EMBEDDING[MASK], SIZE)


def naive_anchors(sample: Sample) -> list[int]:
    return [at for at, weight in enumerate(sample.weights.tolist()) if weight != 0]


def naive_entropies(draft: NaiveDraft, sample: Sample, anchor: int) -> list[Tensor]:
    """Returns the cross entropy of each guess that exists."""
    found, block = [], naive_block(draft, sample, anchor)
    for k in range(1, SIZE):
        if anchor + k < len(sample.tokens):
            found.append(-torch.log_softmax(HEAD.weight @ block[k], 0)[sample.tokens[anchor + k]])
    return found


def largest_difference(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in found)


def gradients_of(value: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(weights, torch.autograd.grad(value, list(weights.values())), strict=True))


def test_packed_blocks_equal_blocks_run_one_at_a_time() -> None:
    """Compares outputs and every gradient. A block that sees its anchor's own features differs."""
    weights, packed = new_weights(), samples()
    blocks = Blocks.sampled(features(packed).packing, labels(packed), OPTIONS, SIZE)
    found = network(weights).outputs(features(packed), blocks)
    draft, aims = naive(weights), drawn(*found.shape, seed=5)
    expected, leaking = (
        torch.stack([torch.stack(naive_block(draft, each, a, leak)) for each in packed for a in naive_anchors(each)])
        for leak in (0, 1)
    )
    all_three = [{"outputs": each.detach()} for each in (found, expected, leaking)]
    for each, outputs in zip(all_three, (found, expected, leaking), strict=True):
        each |= gradients_of((outputs * aims).sum(), weights)
    assert largest_difference(all_three[0], all_three[1]) < 1e-9
    for name in all_three[0]:
        assert largest_difference({name: all_three[0][name]}, {name: all_three[2][name]}) > 1e-3, name


@each_objective
def test_loss_and_gradients_equal_one_block_at_a_time(options: Options) -> None:
    """Position k at anchor a learns x_(a + k), with its weight."""
    weights, packed = new_weights(), samples()
    found, draft, loss = trained(weights, [packed], options), naive(weights), NaiveLoss(str(options["objective"]))
    total, all_weights = torch.zeros((), dtype=torch.float64), []
    for sample in packed:
        for anchor in naive_anchors(sample):
            entropies = naive_entropies(draft, sample, anchor)
            block_weights = [float(sample.weights[anchor + k]) for k in range(len(entropies))]
            values = [float(each.detach()) for each in entropies]
            factors = loss.factors(values, block_weights)
            total = total + sum(factor * each for factor, each in zip(factors, entropies, strict=True))
            all_weights.append(block_weights)
            given = found.cross_entropy[sample.number, anchor]
            assert given.tolist() == pytest.approx(values + [0.0] * (SIZE - 1 - len(values)), abs=1e-9)
    assert float((found.loss - total.detach()).abs()) < 1e-9
    assert float(found.denominator) == pytest.approx(loss.denominator(all_weights), abs=1e-9)
    assert largest_difference(found.gradients, gradients_of(total, weights)) < 1e-9


def arrangements() -> dict[str, Callable[[list[Sample]], list[list[Sample]]]]:
    return {
        "alone": lambda given: [[each] for each in given],
        "backwards": lambda given: [given[::-1]],
        "two": lambda given: [given[:2], given[2:]],
        "two others": lambda given: [given[3:] + given[:1], given[1:3]],
    }


@each_objective
@pytest.mark.parametrize("num_anchors", [512, 3])
@pytest.mark.parametrize("name", arrangements())
def test_packing_order_and_micro_batches_do_not_change_gradients(name: str, num_anchors: int, options: Options) -> None:
    """The choice of blocks does not depend on them either. A mean of the micro-batches' means would differ."""
    weights, options = new_weights(), {**options, "num_anchors": num_anchors}
    batches = arrangements()[name](samples())
    whole, parts = trained(weights, [samples()], options), trained(weights, batches, options)
    assert largest_difference(parts.gradients, whole.gradients) < 1e-9
    assert float((parts.loss - whole.loss).abs()) < 1e-9
    assert float((parts.denominator - whole.denominator).abs()) < 1e-9
    assert largest_difference(parts.cross_entropy, whole.cross_entropy) < 1e-9
    if len(batches) > 1:
        mean = {each: gradient / whole.denominator for each, gradient in whole.gradients.items()}
        assert largest_difference(mean_of_means(weights, batches, options), mean) > 1e-3


def mean_of_means(
    weights: Mapping[str, Tensor], batches: Sequence[Sequence[Sample]], options: Options
) -> dict[str, Tensor]:
    """Averages over the micro-batches that have a loss."""
    found = [trained(weights, [packed], options) for packed in batches]
    means = [{name: each / part.denominator for name, each in part.gradients.items()} for part in found if part.loss]
    return {name: torch.stack([each[name] for each in means]).mean(0) for name in weights}


@pytest.mark.parametrize("chunk_rows", [1, 7, 30])
def test_chunks_of_blocks_score_like_all_at_once(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring and attention are both chunked."""
    weights = new_weights()
    whole = trained(weights, [samples()], DPACE)
    monkeypatch.setattr(block_attention, "MAX_SCORES", chunk_rows * SHAPE.heads * SIZE)
    parts = trained(weights, [samples()], DPACE, chunk_rows)
    assert largest_difference(parts.gradients, whole.gradients) < 1e-12
    assert largest_difference(parts.cross_entropy, whole.cross_entropy) < 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_losses_in_lower_precision_are_close(dtype: torch.dtype, tolerance: float) -> None:
    exact, found = trained(new_weights(), [samples()]), trained(new_weights(dtype), [samples()], dtype=dtype)
    assert largest_difference(found.cross_entropy, exact.cross_entropy) < tolerance
    assert {each.dtype for each in found.gradients.values()} == {dtype}


def test_nan_in_one_sequence_does_not_reach_others() -> None:
    weights, packed = new_weights(), samples()
    packed[2] = replace(packed[2], captured=torch.full_like(packed[2].captured, torch.nan))
    found, expected = (trained(weights, [given]).cross_entropy for given in (packed, samples()))
    wrong = {name for name, each in found.items() if not each.isfinite().all()}
    assert {number for number, _ in wrong} == {2}
    right = found.keys() - wrong
    assert largest_difference({name: found[name] for name in right}, {name: expected[name] for name in right}) < 1e-12


def test_no_anchor_means_no_rows_and_no_gradient() -> None:
    weights = new_weights()
    nothing = [replace(each, weights=torch.zeros_like(each.weights)) for each in samples()]
    draft_pass = network(weights).training_pass(features(nothing), labels(nothing), OPTIONS, LogitBudget(10))
    assert draft_pass.num_rows == 0
    draft_pass.close()
    assert all(weight.grad is None or not weight.grad.any() for weight in weights.values())


def test_greedy_and_sampled_are_products_along_a_block() -> None:
    weights, packed = new_weights(), samples()
    draft_pass = network(weights).training_pass(features(packed), labels(packed), OPTIONS, LogitBudget(1000))
    scores = draft_pass.scores(slice(0, draft_pass.num_rows))
    for row in range(draft_pass.num_rows):
        greedy = sampled = 1.0
        for k in range(SIZE - 1):
            exists = bool(scores.exists[row, k])
            greedy, sampled = greedy * float(scores.correct[row, k]), sampled * float(scores.acceptance[row, k])
            assert float(scores.greedy[row, k]) == pytest.approx(greedy * exists)
            assert float(scores.sampled[row, k]) == pytest.approx(sampled * exists)
            accepted = float((-scores.cross_entropy[row, k]).exp()) * exists
            assert float(scores.acceptance[row, k]) == pytest.approx(accepted)


@pytest.mark.parametrize("name", ["cross_entropy", "acceptance"])
def test_only_existing_guesses_have_gradients(name: str) -> None:
    """The plain sum includes the guesses that do not exist."""
    weights, packed = new_weights(), samples()
    draft_pass = network(weights).training_pass(features(packed), labels(packed), OPTIONS, LogitBudget(1000))
    scores, leaves = draft_pass.scores(slice(0, draft_pass.num_rows)).leaves()
    draft_pass.backward(DraftGradients.of(getattr(scores, name), leaves))
    draft_pass.close()
    draft, total = naive(weights), torch.zeros((), dtype=torch.float64)
    for sample in packed:
        for anchor in naive_anchors(sample):
            entropies = naive_entropies(draft, sample, anchor)
            total = total + sum(each if name == "cross_entropy" else (-each).exp() for each in entropies)
    found = {name: grad for name, weight in weights.items() if (grad := weight.grad) is not None}
    assert largest_difference(found, gradients_of(total, weights)) < 1e-9


@each_objective
def test_uncounted_guesses_have_no_gradient_even_with_nan_logits(options: Options) -> None:
    weights, packed = new_weights(), samples()
    expected, given = trained(weights, [packed], options).gradients, features(packed)
    blocks = Blocks.sampled(given.packing, labels(packed), options, SIZE)
    counts = (labels(packed).weights[blocks.label_indices()] != 0) & blocks.exists()
    for weight in weights.values():
        weight.grad = None
    head = Head(HEAD.weight, wrong=~counts.flatten())
    draft_pass = network(weights).training_pass(replace(given, head=head), labels(packed), options, LogitBudget(1000))
    rows = slice(0, draft_pass.num_rows)
    scores, leaves = draft_pass.scores(rows).leaves()
    draft_pass.backward(
        DraftGradients.of(DFLASH.function(scores, {"weights": draft_pass.weights(rows)}, options).losses, leaves)
    )
    draft_pass.close()
    assert scores.cross_entropy.isnan().any()
    found = {name: grad for name, weight in weights.items() if (grad := weight.grad) is not None}
    assert largest_difference(found, expected) < 1e-12


def test_trained_blocks_predict_their_own_positions() -> None:
    """Drafted from each anchor, the likeliest token at position k is x_(a + k), not the one after it."""
    weights, packed = new_weights(), [replace(each, weights=torch.ones_like(each.weights)) for each in samples((9, 7))]
    optimizer = torch.optim.Adam(weights.values(), lr=0.02)
    for _ in range(60):
        trained(weights, [packed])
        optimizer.step()
    draft, right, one_late, count = naive(weights), 0, 0, 0
    with torch.no_grad():
        for sample in packed:
            for anchor in naive_anchors(sample):
                block = naive_block(draft, sample, anchor)
                for k in range(1, min(SIZE, len(sample.tokens) - 1 - anchor)):
                    predicted = int((HEAD.weight @ block[k]).argmax())
                    right += predicted == sample.tokens[anchor + k]
                    one_late += predicted == sample.tokens[anchor + k + 1]
                    count += 1
    assert right > 0.95 * count
    assert one_late < 0.3 * count


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
    blocks = Blocks.sampled(packing, some, OPTIONS, SIZE)
    rows = (len(blocks.anchors) * SIZE, heads, 4)
    given = [
        drawn(*size, seed=at).requires_grad_() for at, size in enumerate([rows, (num_tokens, 1, 4), (num_tokens, 1, 4)])
    ]
    own = [drawn(rows[0], 1, 4, seed=at).requires_grad_() for at in (8, 9)]
    with LargestTensor() as largest:
        attend_blocks(given[0], KeyValues(*given[1:]), KeyValues(*own), blocks, 0.5).sum().backward()
    assert rows[0] * heads * num_tokens > 10 * most
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
    def anchors_of(packed: Sequence[Sample], seed: int = 3) -> dict[int, list[int]]:
        blocks = Blocks.sampled(features(packed).packing, labels(packed), {"num_anchors": 3, "seed": seed}, SIZE)
        starts = np.cumsum([0, *(len(each.weights) for each in packed)])
        found: dict[int, list[int]] = {each.number: [] for each in packed}
        for anchor in blocks.anchors.tolist():
            at = int(np.searchsorted(starts, anchor, side="right")) - 1
            found[packed[at].number].append(anchor - int(starts[at]))
        return found

    packed = samples((20, 4, 20, 30))
    whole = anchors_of(packed)
    assert all(len(each) <= 3 for each in whole.values())
    assert anchors_of(packed[::-1]) == whole
    assert {each.number: anchors_of([each])[each.number] for each in packed} == whole
    assert anchors_of(packed, seed=4) != whole
    same = [replace(packed[0], number=number) for number in (0, 1)]
    assert anchors_of(same)[0] != anchors_of(same)[1]


@dataclass(frozen=True)
class Guesses:
    """One block: cross-entropies, and which of them exist."""

    entropies: tuple[float, ...]
    exists: tuple[float, ...]

    def scores(self) -> DraftScores:
        entropies, exists = (torch.tensor([each], dtype=torch.float64) for each in (self.entropies, self.exists))
        acceptance = (-entropies).exp() * exists
        correct = (entropies < 0.5) * exists
        return DraftScores(
            entropies.requires_grad_(), acceptance, correct, exists, exists, correct.cumprod(1), acceptance.cumprod(1)
        )


@pytest.mark.parametrize("objective", ["ce", "dpace"])
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
    """A guess that does not count changes nothing, even if it is NaN."""
    entropies = (0.3, 1.7, 0.9, 2.5)
    counted = [weight * each for weight, each in zip(weights, exists, strict=True)]
    given = Guesses(tuple(e if c else float("nan") for e, c in zip(entropies, counted, strict=True)), exists)
    config = {**OPTIONS, "objective": objective, "gamma": 3.0, "alpha": 0.4}
    scores, naive_loss = given.scores(), NaiveLoss(objective, 3.0, 0.4)
    output = DFLASH.function(scores, {"weights": torch.tensor([weights], dtype=torch.float64)}, config)
    factors = naive_loss.factors(entropies, counted)
    expected = [factor * each for factor, each in zip(factors, entropies, strict=True)]
    (gradient,) = torch.autograd.grad(output.losses.sum(), scores.cross_entropy)
    assert output.losses.tolist() == [pytest.approx(expected)]
    assert gradient.tolist() == [pytest.approx(factors)]
    assert output.denominator is not None
    assert float(output.denominator) == pytest.approx(naive_loss.denominator([counted]))
    for k, each in enumerate(counted, 1):
        assert float(output.ratios[f"accuracy/{k}"][1]) == (each != 0)


def test_dpace_loss_equals_a_hand_computed_value() -> None:
    """Computed by hand: for q = 1, 1/2, 1/4 and alpha 1/2 the products are 1, 3/4, 15/32."""
    given = Guesses(tuple(float(-np.log(q)) for q in (1, 0.5, 0.25)), (1, 1, 1))
    output = DFLASH.function(given.scores(), {"weights": torch.ones(1, 3)}, DPACE)
    expected = [(3 / 4 + 15 / 32) * np.log(2), 15 / 32 * np.log(4)]
    assert output.losses.tolist() == [pytest.approx([0.0, *expected])]


def test_defaults_are_filled_in() -> None:
    found = DFlash().with_defaults(DraftConfig(algorithm="dflash"), TARGET, VOCABULARY)
    assert found.model_dump(exclude={"training", "algorithm", "seed"}) == {
        "num_layers": 1,
        "capture_layers": (4,),
        "draft_vocab_size": VOCABULARY,
        "intermediate_size": 24,
        "block_size": 16,
        "mask_token_id": TARGET.pad_token_id,
    }
    assert DFlash().with_defaults(found, TARGET, VOCABULARY) == found


@pytest.mark.parametrize(
    ("num_layers", "num_target_layers", "expected"),
    [
        (5, 36, (1, 9, 17, 25, 33)),
        (1, 36, (18,)),
        (3, 4, (1,)),
        (2, 5, (1, 2)),
        (3, 2, (1,)),
        (2, 1, (0,)),
        (1, 1, (0,)),
    ],
)
def test_captured_layers_are_evenly_spaced(num_layers: int, num_target_layers: int, expected: tuple[int, ...]) -> None:
    target = tiny_config("qwen3", num_hidden_layers=num_target_layers)
    found = DFlash().with_defaults(DraftConfig(algorithm="dflash", num_layers=num_layers), target, 512)
    assert found.capture_layers == expected


@pytest.mark.parametrize("padding", [None, -1, VOCABULARY])
def test_mask_is_the_last_token_if_there_is_no_padding_token(padding: int | None) -> None:
    target = tiny_config("qwen3", vocab_size=VOCABULARY)
    target.pad_token_id = padding
    assert DFlash().with_defaults(DraftConfig(algorithm="dflash"), target, VOCABULARY).mask_token_id == VOCABULARY - 1


@pytest.mark.parametrize(("ends", "mask"), [(3, 4), (4, VOCABULARY - 1), ([3, 4], VOCABULARY - 1)])
def test_mask_is_never_an_end_of_text_token(ends: int | list[int], mask: int) -> None:
    target = tiny_config("qwen3", vocab_size=VOCABULARY)
    target.pad_token_id, target.eos_token_id = 4, ends
    assert DFlash().with_defaults(DraftConfig(algorithm="dflash"), target, VOCABULARY).mask_token_id == mask


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"draft_vocab_size": 11}, "draft_vocab_size is 11: a dflash draft predicts all 23 tokens"),
        ({"mask_token_id": 23}, "mask_token_id is 23: the target has tokens 0 to 22"),
        ({"capture_layers": (1, 9)}, "capture_layers has 9: the target has layers 0 to 8"),
    ],
)
def test_impossible_draft_configs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OperationError, match=message):
        DFlash().with_defaults(DraftConfig(algorithm="dflash", **values), TARGET, VOCABULARY)


def test_parameters_are_named_as_in_released_drafts() -> None:
    names = [each.in_files for each in DFlash().parameters(replace(SHAPE, layers=1))]
    assert names == [
        "fc.weight",
        "hidden_norm.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.self_attn.q_norm.weight",
        "layers.0.self_attn.k_norm.weight",
        "layers.0.post_attention_layernorm.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "norm.weight",
    ]

"""A tiny EAGLE-3 draft and random features of its target, shared by the EAGLE-3 tests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from trainhouse.schemas.models import DraftConfig
from trainhouse.workers.drafts.algorithms.draft_shape import DraftShape
from trainhouse.workers.drafts.algorithms.eagle3 import Eagle3, Eagle3Pass
from trainhouse.workers.drafts.algorithms.logit_budget import LogitBudget
from trainhouse.workers.drafts.sequences.features import DraftInputs
from trainhouse.workers.drafts.sequences.labels import Labels
from trainhouse.workers.drafts.sequences.sequence_shard import SequenceShard
from trainhouse.workers.losses.draft_scores import DraftGradients, DraftScores
from trainhouse.workers.ops.attention import Packing, pack_lengths
from transformers import LlamaConfig

from .naive_eagle3 import FIELDS, NaiveDraft, NaiveSequence, Rollout, naive_scores

HIDDEN, HEADS, HEAD_DIM, TARGET_VOCABULARY = 16, 4, 4, 12
DECAY = 0.8

# Returns the loss of each guess, [m, depth].
Objective = Callable[[DraftScores], Tensor]


def cross_entropy(scores: DraftScores) -> Tensor:
    return scores.cross_entropy


def both(scores: DraftScores) -> Tensor:
    """Uses cross entropy and acceptance, and is not linear in the latter."""
    return scores.cross_entropy + (1.5 - scores.acceptance) ** 2


@dataclass(frozen=True, eq=False)
class TargetSequence:
    """One sequence: the fields of `NaiveSequence` in float64, and the weight of each token."""

    embedded: Tensor
    captured: Tensor
    logits: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.embedded)

    def naive(self) -> NaiveSequence:
        return NaiveSequence(self.embedded, self.captured, self.logits)


@dataclass(frozen=True, eq=False)
class Case:
    """parameters: float64, by name. vocabulary: token ids that the draft can predict."""

    shape: DraftShape
    parameters: Mapping[str, Tensor]
    vocabulary: Tensor

    def sequences(self, lengths: Sequence[int], seed: int = 1) -> list[TargetSequence]:
        generator = torch.Generator().manual_seed(seed)
        return [self._sequence(length, generator) for length in lengths]

    def _sequence(self, length: int, generator: torch.Generator) -> TargetSequence:
        """The target favours the draft's first guesses, so that some of them are right."""

        def drawn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        without_logits = TargetSequence(
            drawn(length, HIDDEN), drawn(length, self.shape.captured * HIDDEN), drawn(0), drawn(length).abs()
        )
        features = packed([without_logits])[0]
        (guessed,) = Eagle3().network(self.shape, self.parameters, self.vocabulary).unrolled(features, 1)
        logits = drawn(length, self.shape.target_vocabulary)
        logits[1:, self.vocabulary] += 2.0 * guessed[:-1] @ self.parameters["lm_head.weight"].t()
        return replace(without_logits, logits=logits)


def some_case(
    kv_heads: int = 2,
    vocabulary: Sequence[int] = range(TARGET_VOCABULARY),
    seed: int = 0,
    target_vocabulary: int = TARGET_VOCABULARY,
) -> Case:
    target = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=8,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=target_vocabulary,
    )
    requested = DraftConfig(algorithm="eagle3", draft_vocab_size=len(vocabulary))
    shape = DraftShape.of(Eagle3().with_defaults(requested, target, target_vocabulary), target, target_vocabulary)
    generator = torch.Generator().manual_seed(seed)
    parameters = {each.key: _drawn(each.shape, generator) for each in Eagle3().parameters(shape)}
    return Case(shape, parameters, torch.tensor(vocabulary))


def _drawn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Norms near 1, and matrices whose outputs are about as large as their inputs."""
    drawn = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return 1.0 + 0.3 * drawn if len(shape) == 1 else drawn / shape[-1] ** 0.5


@dataclass(frozen=True, eq=False)
class Trained:
    """states: [guesses, hidden], all first guesses before the second ones. scores: by field, [tokens, depth].
    gradients: by parameter.
    """

    loss: float
    states: Tensor
    scores: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def differences(self, other: "Trained") -> dict[str, float]:
        """Returns the largest difference per compared quantity, relative where values exceed 1."""
        mine, theirs = self._numbers(), other._numbers()
        return {
            name: float((mine[name] - each).abs().max() / max(1.0, each.abs().max())) for name, each in theirs.items()
        }

    def _numbers(self) -> dict[str, Tensor]:
        return {"loss": torch.tensor(self.loss).double(), "states": self.states} | self.scores | self.gradients


def trained(
    case: Case,
    sequences: Sequence[TargetSequence],
    depth: int,
    budget: LogitBudget | int = 10_000,
    objective: Objective = both,
    dtype: torch.dtype = torch.float64,
) -> Trained:
    """Makes one pass over all sequences, in their order.

    Args:
        budget: a budget for logits, or the number of guesses scored at a time.
        dtype: of weights and features; gradients are float32 at least.
    """
    parameters, gradients = learnable(case.parameters, dtype)
    network = Eagle3().network(case.shape, parameters, case.vocabulary)
    features, labels = packed(sequences, dtype)
    outputs = [each.detach() for each in network.unrolled(features, depth)]
    by_sequence = [output.split([len(each) for each in sequences]) for output in outputs]
    states = [rows[: max(0, len(rows) - 1 - i)] for i, parts in enumerate(by_sequence) for rows in parts]
    budget = LogitBudget(budget) if isinstance(budget, int) else budget
    draft = network.training_pass(features, labels, {"ttt_length": float(depth)}, budget)
    loss, scores = run(draft, objective)
    return Trained(loss, torch.cat(states), scores, gradients)


def naively_trained(
    case: Case,
    sequences: Sequence[TargetSequence],
    depth: int,
    objective: Objective = both,
    rollout: type[Rollout] = Rollout,
) -> Trained:
    """Rolls out the draft from every token, one after the other."""
    shape = case.shape
    weights = {name: each.clone().requires_grad_() for name, each in case.parameters.items()}
    draft = NaiveDraft(weights, case.vocabulary, shape.heads, shape.kv_heads, shape.head_dim, shape.eps)
    found = [naive_scores(draft, each.naive(), depth, rollout) for each in sequences]
    scores = {name: torch.cat([each.scores[name] for each in found]) for name in FIELDS}
    guess_weights = torch.cat([each.weights for each in sequences])[:, None].expand(-1, depth)
    losses = weighted(objective(DraftScores(**scores)), guess_weights) * scores["exists"]
    gradients = torch.autograd.grad(losses.sum(), list(weights.values()))
    states = [state for guess in range(depth) for each in found for at, state in each.states.items() if at[1] == guess]
    return Trained(
        float(losses.detach().sum()),
        torch.stack(states).detach(),
        {name: each.detach() for name, each in scores.items()},
        dict(zip(weights, gradients, strict=True)),
    )


def learnable(values: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns parameters of this type and the buffers that collect their gradients, as in a worker."""
    parameters = {name: each.to(dtype, copy=True).requires_grad_() for name, each in values.items()}
    wide = torch.promote_types(dtype, torch.float32)
    gradients = {name: torch.zeros_like(each, dtype=wide, requires_grad=False) for name, each in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad_dtype = wide
        parameter.grad = gradients[name]
    return parameters, gradients


def packed(sequences: Sequence[TargetSequence], dtype: torch.dtype = torch.float64) -> tuple[DraftInputs, Labels]:
    lengths = [len(each) for each in sequences]
    embedded, captured, logits, weights = (
        torch.cat([getattr(each, name) for each in sequences]) for name in ("embedded", "captured", "logits", "weights")
    )
    wide = torch.promote_types(dtype, torch.float32)
    logits, weights = logits.to(wide), weights.to(wide)
    features = DraftInputs(
        positions=torch.cat([torch.arange(length) for length in lengths]),
        packing=Packing(pack_lengths(lengths)),
        embedded=embedded.to(dtype),
        captured=captured.to(dtype),
        logits=lambda rows: logits[rows],
        shard=SequenceShard(len(weights)),
    )
    zeros = torch.zeros(len(weights), dtype=torch.long)
    return features, Labels(zeros, weights, range(len(lengths)))


def run(draft: Eagle3Pass, objective: Objective) -> tuple[float, dict[str, Tensor]]:
    """Scores chunk after chunk with backward, and returns the summed loss and all scores."""
    total, parts = 0.0, []
    for start in range(0, draft.num_rows, draft.chunk_rows):
        rows = slice(start, min(start + draft.chunk_rows, draft.num_rows))
        scores, leaves = draft.scores(rows).leaves()
        losses = weighted(objective(scores), draft.weights(rows))
        draft.backward(DraftGradients.of(losses, leaves))
        total += float((losses * scores.exists).sum().detach())
        parts.append(scores)
    draft.close()
    fields = FIELDS if parts else ()
    return total, {name: torch.cat([getattr(part, name).detach() for part in parts]) for name in fields}


def weighted(losses: Tensor, weights: Tensor) -> Tensor:
    """Weights further guesses less; both [m, depth]."""
    return losses * weights * DECAY ** torch.arange(losses.shape[1])

"""Tiny drafts of each algorithm, random features of their target, and one training pass over these."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from trainhouse.schemas.models import Algorithm, DraftConfig
from trainhouse.workers.drafts.algorithms.algorithm import DraftNetwork, DraftPass, chunks
from trainhouse.workers.drafts.algorithms.draft_programs import DRAFT_PROGRAMS
from trainhouse.workers.drafts.algorithms.draft_shape import DraftShape
from trainhouse.workers.drafts.losses import DRAFT_LOSSES
from trainhouse.workers.drafts.losses.draft_scores import DraftGradients
from trainhouse.workers.drafts.sequences.features import DraftInputs, Labels, TargetHead
from trainhouse.workers.drafts.sequences.sequence_shard import SequenceShard
from trainhouse.workers.drafts.sequences.target_form import TargetDistribution
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.shapes.logit_budget import LogitBudget
from transformers import LlamaConfig

ALGORITHMS: tuple[Algorithm, ...] = ("eagle3", "dflash")
FIELDS = ("cross_entropy", "acceptance", "correct", "covered", "exists", "greedy", "sampled")
HIDDEN, HEADS, VOCABULARY, BLOCK_SIZE, MASK = 16, 4, 23, 4, 5
SOME_TOKENS = (0, 3, 4, 7, 9, 11, 12, 20)
LENGTHS = (7, 1, 2, 9, 9, 5)
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_length": 3, "objective": "kl", "decay": 0.8, "lk_scale": 0.9, "lk_decay": 2.0},
    "dflash": {"num_anchors": 512, "seed": 3, "objective": "ce", "gamma": 7.0, "alpha": 0.5},
}

AMPLE = LogitBudget(10_000)

Key = tuple[int, int, int]
"""Names a draft token: the number of its sequence, its index into the sequence's labels, and its step."""


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
class TargetSequence:
    """T tokens and the next one, in float64: tokens [T + 1]; embedded [T, hidden]; captured [T, layers * hidden];
    logits [T, vocabulary] of the next token and its weight [T]. number: in its operation.
    """

    number: int
    tokens: Tensor
    embedded: Tensor
    captured: Tensor
    logits: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.embedded)


@dataclass(frozen=True, eq=False)
class Case:
    """parameters: float64, by name. vocabulary: the target's tokens that the draft can propose. options: of the loss.
    embedding: [target's vocabulary, hidden]. head: for DFlash.
    """

    algorithm: Algorithm
    shape: DraftShape
    parameters: Mapping[str, Tensor]
    vocabulary: Tensor
    options: Mapping[str, Any]
    embedding: Tensor
    head: TargetHead | None

    @property
    def depth(self) -> int:
        return self.shape.block_size - 1 if self.shape.block_size else int(self.options["ttt_length"])

    def with_options(self, **options: Any) -> "Case":
        return replace(self, options={**self.options, **options})

    def network(self, parameters: Mapping[str, Tensor]) -> Any:
        return algorithm(self.algorithm).network(self.shape, parameters, self.vocabulary)

    def inputs(self, sequences: Sequence[TargetSequence], dtype: torch.dtype = torch.float64) -> DraftInputs:
        lengths = [len(each) for each in sequences]
        logits = joined(sequences, "logits").to(torch.promote_types(dtype, torch.float32))
        head = Head(self.head.weight.to(dtype)) if isinstance(self.head, Head) else self.head
        return DraftInputs(
            positions=torch.cat([torch.arange(length) for length in lengths]),
            packing=Packing(pack_lengths(lengths)),
            embedded=joined(sequences, "embedded").to(dtype),
            captured=joined(sequences, "captured").to(dtype),
            distribution=lambda rows: TargetDistribution.of(logits[rows], self.vocabulary),
            shard=SequenceShard(sum(lengths)),
            mask=None if (mask := self.shape.mask_token) is None else self.embedding[mask].to(dtype),
            head=head,
        )

    def new_pass(
        self,
        parameters: Mapping[str, Tensor],
        sequences: Sequence[TargetSequence],
        budget: LogitBudget = AMPLE,
        dtype: torch.dtype = torch.float64,
    ) -> DraftPass:
        network: DraftNetwork = self.network(parameters)
        return network.training_pass(self.inputs(sequences, dtype), labels(sequences, dtype), self.options, budget)


def algorithm(name: str) -> Any:
    return DRAFT_PROGRAMS[name].algorithm


def new_case(
    name: Algorithm,
    vocabulary: Sequence[int] = range(VOCABULARY),
    target_vocabulary: int = VOCABULARY,
    kv_heads: int = 2,
    **options: Any,
) -> Case:
    """Returns a draft with random weights. Its norms differ from 1, so that a missing one shows."""
    target = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=8,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=4,
        vocab_size=target_vocabulary,
    )
    fields: dict[str, Any] = {"num_layers": 2, "block_size": BLOCK_SIZE, "mask_token_id": MASK}
    requested = DraftConfig(algorithm=name, draft_vocab_size=len(vocabulary), **fields if name == "dflash" else {})
    shape = DraftShape.of(
        algorithm(name).with_defaults(requested, target, target_vocabulary), target, target_vocabulary
    )
    generator = torch.Generator().manual_seed(11)
    parameters = {each.key: drawn(generator, *each.shape) for each in algorithm(name).parameters(shape)}
    parameters = {key: 1 + 0.3 * x if x.ndim == 1 else x / x.shape[1] ** 0.5 for key, x in parameters.items()}
    embedding, head = (drawn(generator, target_vocabulary, HIDDEN) for _ in range(2))
    return Case(
        name,
        shape,
        parameters,
        torch.tensor(vocabulary),
        {**OPTIONS[name], **options},
        embedding,
        Head(head / 4) if name == "dflash" else None,
    )


def target_sequences(case: Case, lengths: Sequence[int] = LENGTHS) -> list[TargetSequence]:
    """Returns sequences in which some tokens have weight 0, some 0.5."""
    generator, size = torch.Generator().manual_seed(7), case.shape.target_vocabulary
    found = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(size, (length + 1,), generator=generator)
        weights = torch.tensor([0.0, 0.5, 1.0, 1.0])[torch.randint(4, (length,), generator=generator)].double()
        captured = drawn(generator, length, case.shape.captured * HIDDEN)
        logits = drawn(generator, length, size)
        sequence = TargetSequence(number, tokens, case.embedding[tokens[:-1]], captured, logits, weights)
        if case.algorithm == "eagle3":  # The target favours the draft's first tokens, so that some of them are right.
            (hidden,) = case.network(case.parameters).unrolled(case.inputs([sequence]), 1)
            logits[1:, case.vocabulary] += 2.0 * hidden[:-1] @ case.parameters["lm_head.weight"].t()
        found.append(sequence)
    return found


def drawn(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def joined(sequences: Sequence[TargetSequence], name: str) -> Tensor:
    return torch.cat([getattr(each, name) for each in sequences])


def labels(sequences: Sequence[TargetSequence], dtype: torch.dtype = torch.float64) -> Labels:
    targets = torch.cat([each.tokens[1:] for each in sequences])
    weights = joined(sequences, "weights").to(torch.promote_types(dtype, torch.float32))
    return Labels(targets, weights, [each.number for each in sequences])


@dataclass(frozen=True, eq=False)
class Trained:
    """scores: by field, of draft tokens with a weight. gradients: of the summed losses, by parameter."""

    loss: float
    denominator: float
    scores: Mapping[str, Mapping[Key, Tensor]]
    gradients: Mapping[str, Tensor]

    def differences(self, other: "Trained") -> dict[str, float]:
        """Returns the largest difference per compared quantity, relative where values exceed 1."""
        mine, theirs = self._numbers(), other._numbers()
        assert mine.keys() == theirs.keys()
        return {name: largest_error(mine[name], each) for name, each in theirs.items()}

    def difference(self, other: "Trained") -> float:
        return max(self.differences(other).values())

    def _numbers(self) -> dict[str, Tensor]:
        keys = sorted(self.scores["exists"])
        scores = {name: torch.tensor([float(each[key]) for key in keys]).double() for name, each in self.scores.items()}
        totals = torch.tensor([self.loss, self.denominator]).double()
        assert len(keys), "no draft token has a weight"
        return {"totals": totals, "keys": torch.tensor(keys).double()} | scores | dict(self.gradients)


def largest_error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / max(1.0, wanted.abs().max()))


def sum_of(parts: Sequence[Trained]) -> Trained:
    scores = {name: {key: each for part in parts for key, each in part.scores[name].items()} for name in FIELDS}
    gradients = {name: torch.stack([part.gradients[name] for part in parts]).sum(0) for name in parts[0].gradients}
    return Trained(sum(part.loss for part in parts), sum(part.denominator for part in parts), scores, gradients)


def trained(
    case: Case,
    sequences: Sequence[TargetSequence],
    budget: LogitBudget = AMPLE,
    dtype: torch.dtype = torch.float64,
    change: Callable[[DraftInputs], DraftInputs] = lambda inputs: inputs,
) -> Trained:
    """Makes one pass over all sequences, in their order.

    Args:
        dtype: of weights and features; gradients are float32 at least.
        change: applied to the inputs.
    """
    parameters, gradients = learnable(case.parameters, dtype)
    inputs = change(case.inputs(sequences, dtype))
    draft_pass = case.network(parameters).training_pass(inputs, labels(sequences, dtype), case.options, budget)
    return differentiated(case, draft_pass, sequences, gradients)


def differentiated(
    case: Case, draft_pass: DraftPass, sequences: Sequence[TargetSequence], gradients: Mapping[str, Tensor]
) -> Trained:
    """Scores chunk after chunk with backward."""
    names = [(each.number, label) for each in sequences for label in range(len(each))]
    loss = denominator = 0.0
    found: dict[str, dict[Key, Tensor]] = {name: {} for name in FIELDS}
    for rows in chunks(draft_pass.num_rows, draft_pass.chunk_rows):
        scores, leaves = draft_pass.scores(rows).leaves()
        weights, indices = draft_pass.weights(rows), draft_pass.label_indices(rows)
        output = DRAFT_LOSSES[case.algorithm].function(scores, {"weights": weights}, case.options)
        draft_pass.backward(DraftGradients.of(output.losses, leaves))
        assert output.denominator is not None
        loss, denominator = loss + float(output.losses.detach().sum()), denominator + float(output.denominator)
        for row, step in ((weights != 0) & (scores.exists != 0)).nonzero().tolist():
            key = (*names[int(indices[row, step])], step)
            for name, of_field in found.items():
                of_field[key] = getattr(scores, name)[row, step].detach()
    draft_pass.close()
    return Trained(loss, denominator, found, gradients)


def learnable(values: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns parameters of this type and the buffers that collect their gradients, as in a worker."""
    parameters = {name: each.to(dtype, copy=True).requires_grad_() for name, each in values.items()}
    wide = torch.promote_types(dtype, torch.float32)
    gradients = {name: torch.zeros_like(each, dtype=wide, requires_grad=False) for name, each in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad_dtype = wide
        parameter.grad = gradients[name]
    return parameters, gradients

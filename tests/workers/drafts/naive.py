"""Drafts as in drafting: one sequence, one token or block at a time, in float64.

Written from the formulas of the papers (EAGLE-3, https://arxiv.org/abs/2503.01840; DFlash,
https://arxiv.org/abs/2602.06036) and of Llama's and Qwen's layers, independently of the code that it is compared with.
Parameters have the names of released drafts. Gradients are autograd's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trainhouse.workers.drafts.sequences.blocks import TokenRandom, sample_anchors

from .case import FIELDS, Case, Key, TargetSequence, Trained


class NaiveDraft:
    """A draft that has observed the first tokens of a sequence and proposes the tokens after the next one."""

    theta = 10000.0

    def __init__(self, case: Case, weights: Mapping[str, Tensor], sequence: TargetSequence, num_observed: int) -> None:
        self.case, self.shape, self.weights = case, case.shape, weights
        self.sequence, self.num_observed = sequence, num_observed

    def distributions(self, num: int) -> list[Tensor]:
        """Returns the draft's distributions of draft tokens, if each is the text's."""
        raise NotImplementedError

    def product(self, name: str, x: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] @ x

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.shape.eps).sqrt() * self.weights[f"{name}.weight"]

    def heads(self, x: Tensor) -> Tensor:
        return x.view(-1, self.shape.head_dim)

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """Rotates x [heads, head_dim]. Angles are float32, as in every engine."""
        half = self.shape.head_dim // 2
        frequencies = 1.0 / self.theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
        angles = torch.tensor(float(position)) * frequencies
        cos, sin = angles.cos().double(), angles.sin().double()
        first, second = x[:, :half], x[:, half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)

    def attended(self, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Returns one token's output of attention, [heads * head_dim]. Keys and values are [kv_heads, head_dim]."""
        outs = []
        for head in range(self.shape.heads):
            kv_head = head // (self.shape.heads // self.shape.kv_heads)
            scores = torch.stack([query[head] @ key[kv_head] / math.sqrt(self.shape.head_dim) for key in keys])
            outs.append(scores.softmax(0) @ torch.stack([value[kv_head] for value in values]))
        return torch.cat(outs)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate = self.product(f"{name}.gate_proj", x)
        return self.product(f"{name}.down_proj", gate * gate.sigmoid() * self.product(f"{name}.up_proj", x))


class NaiveEagle3(NaiveDraft):
    """Continues from the target's features of the last observed token, its anchor, with the draft's own states."""

    def distributions(self, num: int) -> list[Tensor]:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        anchor = self.num_observed - 1
        for token in range(anchor):
            self.forward(token + 1, self.feature(token), token)
        states = [self.forward(anchor + 1, self.feature(anchor), anchor)]
        while len(states) < num:
            step = len(states)
            states.append(self.forward(anchor + 1 + step, states[-1], self.position(step)))
        return [self.product("lm_head", self.norm("norm", state)).softmax(0) for state in states]

    def feature(self, token: int) -> Tensor:
        return self.product("fc", self.sequence.captured[token])

    def position(self, step: int) -> int:
        return self.num_observed - 1 + step

    def embedding(self, token: int) -> Tensor:
        return self.sequence.embedded[token]

    def visible(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors

    def forward(self, token: int, state: Tensor, position: int) -> Tensor:
        """Runs one token through the layer, keeps its key and value, and returns the state after it."""
        embedded = self.norm("midlayer.input_layernorm", self.embedding(token))
        both = torch.cat([embedded, self.norm("midlayer.hidden_norm", state)])
        query, key, value = (self.heads(self.product(f"midlayer.self_attn.{name}_proj", both)) for name in "qkv")
        self.keys.append(self.rotated(key, position))
        self.values.append(value)
        attended = self.attended(self.rotated(query, position), self.visible(self.keys), self.visible(self.values))
        state = state + self.product("midlayer.self_attn.o_proj", attended)
        return state + self.mlp("midlayer.mlp", self.norm("midlayer.post_attention_layernorm", state))


class FeaturesOfTheTokenBefore(NaiveEagle3):
    def feature(self, token: int) -> Tensor:
        return super().feature(max(0, token - 1))


class FeaturesOfTheNextToken(NaiveEagle3):
    """These do not exist yet in drafting."""

    def feature(self, token: int) -> Tensor:
        return super().feature(min(token + 1, len(self.sequence) - 1))


class EmbeddingsOfTheNextToken(NaiveEagle3):
    def embedding(self, token: int) -> Tensor:
        return super().embedding(min(token + 1, len(self.sequence) - 1))


class PositionsOfTheAnchor(NaiveEagle3):
    def position(self, step: int) -> int:
        return self.num_observed - 1


class NoKeysOfDraftTokens(NaiveEagle3):
    def visible(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors[: self.num_observed]


class NaiveDFlash(NaiveDraft):
    """Runs one block, whose anchor is the token after the observed ones. It needs no mask, because the block gets only
    what it may see."""

    def distributions(self, num: int) -> list[Tensor]:
        size = self.shape.block_size
        assert size is not None and self.case.head is not None
        context = [self.norm("hidden_norm", self.product("fc", each)) for each in self.context()]
        masks = [self.case.embedding[self.shape.mask_token]] * (size - 1)
        states = [self.sequence.embedded[self.num_observed], *masks]
        for layer in range(self.shape.layers):
            states = self.layer(f"layers.{layer}", context, states)
        hidden = torch.stack([self.norm("norm", state) for state in states[1 : num + 1]])
        return list(self.case.head.logits(hidden).softmax(-1))

    def context(self) -> Tensor:
        return self.sequence.captured[: self.num_observed]

    def position(self, number: int) -> int:
        return self.num_observed + number

    def visible(self, tensors: list[Tensor], number: int) -> list[Tensor]:
        """Returns what the block's token with this number sees."""
        return tensors

    def layer(self, name: str, context: list[Tensor], states: list[Tensor]) -> list[Tensor]:
        normed = [self.norm(f"{name}.input_layernorm", state) for state in states]
        tokens = [*enumerate(context), *((self.position(number), x) for number, x in enumerate(normed))]
        keys = [self.projected(f"{name}.self_attn", "k", x, position) for position, x in tokens]
        values = [self.heads(self.product(f"{name}.self_attn.v_proj", x)) for _, x in tokens]
        found = []
        for number, (state, x) in enumerate(zip(states, normed, strict=True)):
            query = self.projected(f"{name}.self_attn", "q", x, self.position(number))
            attended = self.attended(query, self.visible(keys, number), self.visible(values, number))
            state = state + self.product(f"{name}.self_attn.o_proj", attended)
            found.append(state + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", state)))
        return found

    def projected(self, name: str, kind: str, x: Tensor, position: int) -> Tensor:
        heads = self.heads(self.product(f"{name}.{kind}_proj", x))
        return self.rotated(self.norm(f"{name}.{kind}_norm", heads), position)


class FeaturesOfTheAnchor(NaiveDFlash):
    """These do not exist yet in drafting."""

    def context(self) -> Tensor:
        return self.sequence.captured[: self.num_observed + 1]


class PositionsOneLater(NaiveDFlash):
    def position(self, number: int) -> int:
        return super().position(number) + 1


class CausalBlock(NaiveDFlash):
    def visible(self, tensors: list[Tensor], number: int) -> list[Tensor]:
        return tensors[: self.num_observed + number + 1]


NAIVE: dict[str, type[NaiveDraft]] = {"eagle3": NaiveEagle3, "dflash": NaiveDFlash}
WRONG: dict[str, tuple[type[NaiveDraft], ...]] = {
    "eagle3": (
        FeaturesOfTheTokenBefore,
        FeaturesOfTheNextToken,
        EmbeddingsOfTheNextToken,
        PositionsOfTheAnchor,
        NoKeysOfDraftTokens,
    ),
    "dflash": (FeaturesOfTheAnchor, PositionsOneLater, CausalBlock),
}

Fields = dict[str, Tensor]


def naively_trained(case: Case, sequences: Sequence[TargetSequence], draft: type[NaiveDraft] | None = None) -> Trained:
    """Drafts from every token, or from every anchor, one after the other."""
    weights = {name: each.double().clone().requires_grad_() for name, each in case.parameters.items()}
    predictions = naive_predictions(case, weights, sequences, draft or NAIVE[case.algorithm])
    token_weights = {each.number: each.weights.tolist() for each in sequences}
    counted = {(number, label, step): token_weights[number][label] for number, label, step in predictions}
    loss, denominator = LOSSES[case.algorithm](predictions, counted, case.options)
    gradients = torch.autograd.grad(loss, list(weights.values()))
    scores = {name: {key: each[name].detach() for key, each in predictions.items() if counted[key]} for name in FIELDS}
    return Trained(float(loss.detach()), denominator, scores, dict(zip(weights, gradients, strict=True)))


def naive_predictions(
    case: Case, weights: Mapping[str, Tensor], sequences: Sequence[TargetSequence], draft: type[NaiveDraft]
) -> dict[Key, Fields]:
    found: dict[Key, Fields] = {}
    for sequence in sequences:
        for num_observed in numbers_observed(case, sequence):
            num = min(case.depth, len(sequence) - num_observed)
            greedy = sampled = torch.ones((), dtype=torch.float64)
            for step, drafted in enumerate(draft(case, weights, sequence, num_observed).distributions(num)):
                label = num_observed + step
                fields = compared(case, drafted, sequence, label)
                greedy, sampled = greedy * fields["correct"], sampled * fields["acceptance"]
                found[sequence.number, label, step] = fields | {"greedy": greedy, "sampled": sampled}
    return found


def numbers_observed(case: Case, sequence: TargetSequence) -> Sequence[int]:
    """Returns after how many tokens of the sequence the draft is trained to propose some."""
    if case.algorithm == "eagle3":
        return range(1, len(sequence))
    random = TokenRandom(int(case.options["seed"]), sequence.number)
    return sample_anchors(sequence.weights.numpy(), random, int(case.options["num_anchors"])).tolist()


def compared(case: Case, drafted: Tensor, sequence: TargetSequence, label: int) -> Fields:
    """Compares the draft's distribution with the target's, or, for DFlash, with the text's token."""

    def real(value: float) -> Tensor:
        return torch.tensor(float(value), dtype=torch.float64)

    if case.algorithm == "dflash":
        token = int(sequence.tokens[label + 1])
        exact = {"correct": real(int(drafted.argmax()) == token), "covered": real(1), "exists": real(1)}
        return {"cross_entropy": -drafted[token].log(), "acceptance": drafted[token]} | exact
    logits, tokens = sequence.logits[label], case.vocabulary.tolist()
    likeliest, learned, target = int(logits.argmax()), logits[case.vocabulary].softmax(0), logits.softmax(0)
    return {
        "cross_entropy": -sum(learned[i] * drafted[i].log() for i in range(len(tokens))),
        "acceptance": sum(torch.minimum(target[token], drafted[i]) for i, token in enumerate(tokens)),
        "correct": real(tokens[int(drafted.argmax())] == likeliest),
        "covered": real(likeliest in tokens),
        "exists": real(1),
    }  # pyright: ignore[reportReturnType]


def eagle3_loss(
    predictions: Mapping[Key, Fields], weights: Mapping[Key, float], options: Mapping[str, Any]
) -> tuple[Tensor, float]:
    total, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for key, fields in predictions.items():
        counted, acceptance = weights[key] * float(fields["covered"]), fields["acceptance"]
        share = options["lk_scale"] * torch.exp(-options["lk_decay"] * acceptance.detach())
        losses = {
            "kl": fields["cross_entropy"],
            "lk_alpha": -acceptance.log(),
            "lk_lambda": share * fields["cross_entropy"] + (1 - share) * (1 - acceptance),
        }
        total = total + counted * options["decay"] ** key[2] * losses[options["objective"]]
        denominator += counted if key[2] == 0 else 0.0
    return total, denominator


def dflash_loss(
    predictions: Mapping[Key, Fields], weights: Mapping[Key, float], options: Mapping[str, Any]
) -> tuple[Tensor, float]:
    total, denominator = torch.zeros((), dtype=torch.float64), 0.0
    blocks: dict[tuple[int, int], list[Key]] = {}
    for number, label, step in predictions:
        blocks.setdefault((number, label - step), []).append((number, label, step))
    for keys in blocks.values():
        entropies, counted = [predictions[key]["cross_entropy"] for key in keys], [weights[key] for key in keys]
        factors = dflash_factors([float(each.detach()) for each in entropies], counted, options)
        total = total + sum(factor * each for factor, each in zip(factors, entropies, strict=True))
        denominator += dflash_denominator(counted, options)
    return total, denominator


def dflash_factors(entropies: Sequence[float], weights: Sequence[float], options: Mapping[str, Any]) -> list[float]:
    """Returns the factor of each cross-entropy of a block; a weight is 0 where a draft token does not exist."""
    if options["objective"] == "ce":
        return [weight * math.exp(-k / options["gamma"]) for k, weight in enumerate(weights)]
    alpha, found = options["alpha"], []
    for k, weight in enumerate(weights):
        reached = [
            math.prod((1 - alpha) * math.exp(-entropies[i]) + alpha for i in range(last + 1) if weights[i])
            for last in range(k, len(weights))
            if weights[last]
        ]
        found.append(weight * sum(reached))
    return found


def dflash_denominator(weights: Sequence[float], options: Mapping[str, Any]) -> float:
    return sum(dflash_factors([0.0] * len(weights), weights, options)) if options["objective"] == "ce" else weights[0]


LOSSES = {"eagle3": eagle3_loss, "dflash": dflash_loss}

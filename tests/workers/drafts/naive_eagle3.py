"""EAGLE-3 as in drafting: one sequence, one anchor, one token after the other, in float64.

Written from the formulas of Li et al. (2025), https://arxiv.org/abs/2503.01840, and of Llama's layers, independently of
the code that it is compared with. Gradients are autograd's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FIELDS = ("cross_entropy", "acceptance", "correct", "covered", "exists", "greedy", "sampled")


@dataclass(frozen=True, eq=False)
class NaiveDraft:
    """weights: by the names in released drafts. vocabulary: target tokens that it can predict. theta: of the rotary
    embedding.
    """

    weights: Mapping[str, Tensor]
    vocabulary: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float = 10000.0

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + self.eps).sqrt() * self.weights[f"{name}.weight"]

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """x: [heads, head_dim]. Angles are float32, as in every engine."""
        frequencies = 1.0 / self.theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.tensor(float(position)) * frequencies
        cos, sin = angles.cos().double(), angles.sin().double()
        half = self.head_dim // 2
        first, second = x[:, :half], x[:, half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)

    def guess(self, state: Tensor) -> Tensor:
        """Returns the distribution over `vocabulary`."""
        return (self.weights["lm_head.weight"] @ self.norm(state, "norm")).softmax(0)


@dataclass(frozen=True, eq=False)
class NaiveSequence:
    """A sequence's data from the target: embedded [tokens, hidden], captured [tokens, layers * hidden], logits [tokens,
    target vocabulary] of the next token.
    """

    embedded: Tensor
    captured: Tensor
    logits: Tensor

    def __len__(self) -> int:
        return len(self.embedded)


class Rollout:
    """Continues from the target's features up to a token, its anchor, with the draft's own states."""

    def __init__(self, draft: NaiveDraft, sequence: NaiveSequence, anchor: int) -> None:
        self.draft, self.sequence, self.anchor = draft, sequence, anchor
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def states(self, depth: int) -> list[Tensor]:
        """Returns the state after each guess that exists, at most `depth`."""
        anchor = self.anchor
        for token in range(anchor):
            self.forward(token + 1, self.feature(token), token)
        states = [self.forward(anchor + 1, self.feature(anchor), anchor)]
        while len(states) < depth and anchor + 1 + len(states) < len(self.sequence):
            guess = len(states)
            states.append(self.forward(anchor + 1 + guess, states[-1], self.position(guess)))
        return states

    def feature(self, token: int) -> Tensor:
        return self.draft.weights["fc.weight"] @ self.sequence.captured[token]

    def position(self, guess: int) -> int:
        return self.anchor + guess

    def seen(self) -> tuple[Tensor, Tensor]:
        """Returns keys and values, [tokens so far, kv_heads, head_dim]."""
        return torch.stack(self.keys), torch.stack(self.values)

    def forward(self, token: int, state: Tensor, position: int) -> Tensor:
        """Runs one token through the layer, keeps its key and value, and returns the state after it."""
        draft, weights = self.draft, self.draft.weights
        embedded = draft.norm(self.sequence.embedded[token], "midlayer.input_layernorm")
        both = torch.cat([embedded, draft.norm(state, "midlayer.hidden_norm")])
        query, key, value = (
            (weights[f"midlayer.self_attn.{name}_proj.weight"] @ both).view(-1, draft.head_dim) for name in "qkv"
        )
        self.keys.append(draft.rotated(key, position))
        self.values.append(value)
        attended = self.attended(draft.rotated(query, position))
        state = state + weights["midlayer.self_attn.o_proj.weight"] @ attended.flatten()
        return state + self.update(draft.norm(state, "midlayer.post_attention_layernorm"))

    def attended(self, query: Tensor) -> Tensor:
        (keys, values), outs = self.seen(), []
        for head in range(self.draft.heads):
            kv_head = head // (self.draft.heads // self.draft.kv_heads)
            weights = (keys[:, kv_head] @ query[head] / self.draft.head_dim**0.5).softmax(0)
            outs.append(weights @ values[:, kv_head])
        return torch.stack(outs)

    def update(self, x: Tensor) -> Tensor:
        gate, up, down = (self.draft.weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gated = gate @ x
        return down @ (gated * gated.sigmoid() * (up @ x))


@dataclass(frozen=True, eq=False)
class NaiveScores:
    """states: by (anchor, guess), the input of the output head. scores: by field, [tokens, depth], of guesses of the
    next token.
    """

    states: dict[tuple[int, int], Tensor]
    scores: dict[str, Tensor]


def naive_scores(
    draft: NaiveDraft, sequence: NaiveSequence, depth: int, rollout: type[Rollout] = Rollout
) -> NaiveScores:
    """Scores the guesses from each token of a sequence."""
    states: dict[tuple[int, int], Tensor] = {}
    table: dict[str, dict[tuple[int, int], Tensor]] = {name: {} for name in FIELDS}
    for anchor in range(len(sequence) - 1):
        greedy, sampled = torch.tensor(1.0).double(), torch.tensor(1.0).double()
        for guess, state in enumerate(rollout(draft, sequence, anchor).states(depth)):
            states[anchor, guess] = draft.norm(state, "norm")
            place = anchor + 1 + guess
            found = compared(draft, draft.guess(state), sequence.logits[place])
            greedy, sampled = greedy * found["correct"], sampled * found["acceptance"]
            for name, value in (found | {"greedy": greedy, "sampled": sampled}).items():
                table[name][place, guess] = value
    return NaiveScores(states, {name: _filled(cells, len(sequence), depth) for name, cells in table.items()})


def compared(draft: NaiveDraft, drafted: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """drafted: over the draft's vocabulary; logits: the target's, over its own vocabulary."""
    teacher = logits[draft.vocabulary].softmax(0)
    target_probabilities = logits.softmax(0)
    likeliest = int(logits.argmax())
    cross_entropy, acceptance = torch.zeros(()).double(), torch.zeros(()).double()
    for number, token in enumerate(draft.vocabulary.tolist()):
        cross_entropy = cross_entropy - teacher[number] * drafted[number].log()
        acceptance = acceptance + torch.minimum(target_probabilities[token], drafted[number])
    return {
        "cross_entropy": cross_entropy,
        "acceptance": acceptance,
        "correct": torch.tensor(float(int(draft.vocabulary[drafted.argmax()]) == likeliest)).double(),
        "covered": torch.tensor(float(likeliest in draft.vocabulary.tolist())).double(),
        "exists": torch.tensor(1.0).double(),
    }


def _filled(cells: dict[tuple[int, int], Tensor], num_rows: int, depth: int) -> Tensor:
    """Fills missing cells with 0."""
    zero = torch.zeros(()).double()
    rows = [torch.stack([cells.get((row, column), zero) for column in range(depth)]) for row in range(num_rows)]
    return torch.stack(rows)

"""DFlash one block at a time, as in drafting: loops over layers, heads and tokens. It needs no mask, because a block
gets only what it may see.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class NaiveDraft:
    """weights: float64, by name."""

    weights: Mapping[str, Tensor]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float

    def guesses(self, captured: Tensor, anchor: int, known: Tensor, mask: Tensor, size: int) -> list[Tensor]:
        """Returns the final states of a block.

        Args:
            captured: of the tokens that the block sees, from the sequence's first.
            anchor: position of the known token.
        """
        context = [self._norm("hidden_norm", self._product("fc", each)) for each in captured]
        states = [known] + [mask] * (size - 1)
        for layer in range(self.layers):
            states = self._layer(f"layers.{layer}", context, states, anchor)
        return [self._norm("norm", state) for state in states]

    def _layer(self, name: str, context: list[Tensor], states: list[Tensor], anchor: int) -> list[Tensor]:
        normed = [self._norm(f"{name}.input_layernorm", state) for state in states]
        seen = list(enumerate(context)) + list(enumerate(normed, anchor))
        keys = [self._keys(f"{name}.self_attn", seen, head) for head in range(self.kv_heads)]
        values = [
            [self._of_head(f"{name}.self_attn.v_proj", x, head) for _, x in seen] for head in range(self.kv_heads)
        ]
        found = []
        for position, (state, x) in enumerate(zip(states, normed, strict=True), anchor):
            state = state + self._attended(f"{name}.self_attn", x, position, keys, values)
            x = self._norm(f"{name}.post_attention_layernorm", state)
            gate = self._product(f"{name}.mlp.gate_proj", x)
            gate = gate / (1 + torch.exp(-gate))
            found.append(state + self._product(f"{name}.mlp.down_proj", gate * self._product(f"{name}.mlp.up_proj", x)))
        return found

    def _keys(self, name: str, seen: Sequence[tuple[int, Tensor]], head: int) -> list[Tensor]:
        keys = [self._norm(f"{name}.k_norm", self._of_head(f"{name}.k_proj", x, head)) for _, x in seen]
        return [self._rotated(key, position) for key, (position, _) in zip(keys, seen, strict=True)]

    def _attended(
        self, name: str, x: Tensor, position: int, keys: Sequence[list[Tensor]], values: Sequence[list[Tensor]]
    ) -> Tensor:
        parts = []
        for head in range(self.heads):
            kv_head = head // (self.heads // self.kv_heads)
            query = self._rotated(self._norm(f"{name}.q_norm", self._of_head(f"{name}.q_proj", x, head)), position)
            scores = [(query * key).sum() / math.sqrt(self.head_dim) for key in keys[kv_head]]
            parts.append(torch.stack(scores).softmax(0) @ torch.stack(values[kv_head]))
        return self._product(f"{name}.o_proj", torch.cat(parts))

    def _of_head(self, name: str, x: Tensor, head: int) -> Tensor:
        return self._product(name, x)[head * self.head_dim : (head + 1) * self.head_dim]

    def _rotated(self, x: Tensor, position: int) -> Tensor:
        half = self.head_dim // 2
        rotated = [torch.zeros((), dtype=x.dtype)] * self.head_dim
        for i in range(half):
            angle = torch.tensor(float(position)) * torch.tensor(float(np.float32(self.theta ** (-i / half))))
            cos, sin = float(angle.cos()), float(angle.sin())
            rotated[i] = x[i] * cos - x[i + half] * sin
            rotated[i + half] = x[i + half] * cos + x[i] * sin
        return torch.stack(rotated)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.eps) * self.weights[f"{name}.weight"]

    def _product(self, name: str, x: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] @ x


@dataclass(frozen=True)
class NaiveLoss:
    """Blocks are lists of guesses; a weight is 0 where a guess does not exist."""

    objective: str
    gamma: float = 7.0
    alpha: float = 0.5

    def factors(self, entropies: Sequence[float], weights: Sequence[float]) -> list[float]:
        """Returns the factor of each cross entropy of a block."""
        if self.objective == "ce":
            return [weight * math.exp(-k / self.gamma) for k, weight in enumerate(weights)]
        found = []
        for k, weight in enumerate(weights):
            total = 0.0
            for last in range(k, len(weights)):
                if weights[last] == 0:
                    continue
                reached = 1.0
                for i in range(last + 1):
                    if weights[i] != 0:
                        reached *= (1 - self.alpha) * math.exp(-entropies[i]) + self.alpha
                total += reached
            found.append(weight * total)
        return found

    def denominator(self, weights: Sequence[Sequence[float]]) -> float:
        if self.objective == "ce":
            return sum(sum(self.factors([0.0] * len(block), block)) for block in weights)
        return sum(block[0] for block in weights)

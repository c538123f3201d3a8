"""A small recurrence for tests of caches: moving sums whose decay depends on the token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from trainhouse.workers.ops.attention import Packing
from trainhouse.workers.ops.recurrence import StateKind


@dataclass(frozen=True)
class MovingSum:
    """Computes s = decay * s + x at each token of x [tokens, width], for decays [tokens, 1], and returns all s."""

    width: int
    layer: int = 0

    @property
    def state(self) -> StateKind:
        return StateKind(self.layer, "sum", (self.width,), torch.float32)

    def scan(self, inputs: Sequence[Tensor], packing: Packing, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, decay = inputs
        lengths = [group.length for group in packing.groups for _ in range(group.count)]
        assert sum(lengths) == len(x) == len(decay) and (initial is None or len(initial) == len(lengths))
        sums, finals, start = [], [], 0
        for number, length in enumerate(lengths):
            state = x.new_zeros(self.width) if initial is None else initial[number]
            for token in range(start, start + length):
                state = decay[token] * state + x[token]
                sums.append(state)
            finals.append(state)
            start += length
        return torch.stack(sums), torch.stack(finals)

    def step(self, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor:
        x, decay = inputs
        states[slots] = decay * states[slots] + x
        return states[slots]

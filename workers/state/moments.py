"""Storage formats of AdamW's moments of a vector of weights, and the step on them."""

from typing import Protocol

import torch
from torch import Tensor

from ..ops.frozen.quantized import bitsandbytes_functional


class MomentFormat(Protocol):
    """A storage format of AdamW's moments; names are exp_avg and exp_avg_sq."""

    def zeros(self, weights: Tensor) -> Tensor:
        """Returns a moment of weights [P] before the first step."""
        ...

    def to_float32(self, held: Tensor, name: str, size: int) -> Tensor:
        """Returns the moment as float32 [P], which may be `held` itself."""
        ...

    def store(self, held: Tensor, name: str, values: Tensor) -> None:
        """Stores values, float32 [P], in `held`."""
        ...


class Float32Moments:
    def zeros(self, weights: Tensor) -> Tensor:
        return torch.zeros_like(weights)

    def to_float32(self, held: Tensor, name: str, size: int) -> Tensor:
        return held

    def store(self, held: Tensor, name: str, values: Tensor) -> None:
        held.copy_(values)


class EightBitMoments:
    """Stores 8 bits per element, and one float32 maximum per 256 of them.

    Dettmers et al., 8-bit optimizers via block-wise quantization (2022), https://arxiv.org/abs/2110.02861, by
    bitsandbytes. A stored moment is uint8 [P + 4 * blocks], the scales after the numbers.
    """

    block = 256

    # Numbers processed at a time: bitsandbytes makes float32 copies of them on the CPU.
    _most = 1 << 20

    def __init__(self) -> None:
        self._codes: dict[tuple[str, torch.device], Tensor] = {}

    def zeros(self, weights: Tensor) -> Tensor:
        return weights.new_zeros(len(weights) + 4 * -(-len(weights) // self.block), dtype=torch.uint8)

    def to_float32(self, held: Tensor, name: str, size: int) -> Tensor:
        values = torch.empty(size, device=held.device)
        for start in range(0, size, self._most):
            part = slice(start, min(start + self._most, size))
            codes, scales = self._part(held, part, size)
            of_part = bitsandbytes_functional().dequantize_blockwise(
                codes, absmax=scales, code=self._code(name, held.device), blocksize=self.block
            )
            values[part] = of_part
        return values

    def store(self, held: Tensor, name: str, values: Tensor) -> None:
        for start in range(0, len(values), self._most):
            part = slice(start, min(start + self._most, len(values)))
            codes, scales = self._part(held, part, len(values))
            found, state = bitsandbytes_functional().quantize_blockwise(
                values[part], code=self._code(name, held.device), blocksize=self.block
            )
            codes.copy_(found)
            scales.copy_(state.absmax)

    def step(
        self,
        weights: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        num_steps: int,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
    ) -> None:
        """Makes AdamW's step in place. `num_steps` includes this one."""
        codes = [self._code(name, weights.device) for name in ("exp_avg", "exp_avg_sq")]
        for start in range(0, len(weights), self._most):
            part = slice(start, min(start + self._most, len(weights)))
            first, first_scales = self._part(exp_avg, part, len(weights))
            second, second_scales = self._part(exp_avg_sq, part, len(weights))
            bitsandbytes_functional().optimizer_update_8bit_blockwise(
                "adam", gradient[part], weights[part], first, second, beta1, beta2, 0.0, 0.0, eps, num_steps, lr,
                *codes, first_scales, second_scales, weight_decay=weight_decay,
            )  # fmt: skip

    def _code(self, name: str, device: torch.device) -> Tensor:
        """Returns the 256 numbers that 8 bits stand for; those of squares have no sign."""
        if (name, device) not in self._codes:
            made = bitsandbytes_functional().create_dynamic_map(signed=name == "exp_avg")
            self._codes[name, device] = made.to(device)
        return self._codes[name, device]

    def _part(self, held: Tensor, part: slice, size: int) -> tuple[Tensor, Tensor]:
        """Returns the numbers and the scales of `part`, which starts at a block."""
        scales = held[size:].view(torch.float32)
        return held[part], scales[part.start // self.block : -(-part.stop // self.block)]


MOMENTS: dict[str, MomentFormat] = {"float32": Float32Moments(), "8bit": EightBitMoments()}
"""Keyed by WorkerConfig.optimizer_states."""

"""Adapts causal-conv1d's kernels of depthwise convolutions."""

from typing import ClassVar

import torch
from torch import Tensor

# The kernel reads the numbers of up to a block of 64 tokens, also beyond the row's end.
_SPARE_NUMBERS = 64


class CausalConv1d:
    """Runs convolutions. Computes in float32; a token reads others only if their sequence has the same number."""

    NAME: ClassVar[str] = "causal-conv1d"
    TASK: ClassVar[str] = "convolutions"

    def __init__(self) -> None:
        from causal_conv1d import (  # pyright: ignore[reportMissingImports]
            causal_conv1d_fn,
            causal_conv1d_update,
        )

        self._scan, self._step = causal_conv1d_fn, causal_conv1d_update

    @staticmethod
    def misfit(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
        """Returns why the library cannot convolve x, if it cannot."""
        channels, width = len(weight), weight.shape[-1]
        if x.dtype != torch.bfloat16:
            return f"inputs are {x.dtype}, not bfloat16"
        if not 2 <= width <= 4:
            return f"the width is {width}, not 2 to 4"
        if channels % 8:
            return f"{channels} channels are no multiple of 8"
        if bias is not None and bias.dtype != weight.dtype:
            return f"the bias is {bias.dtype}, the weight {weight.dtype}"
        return None

    def scan(self, x: Tensor, weight: Tensor, bias: Tensor | None, is_silu: bool, numbers: Tensor) -> Tensor:
        """Returns the convolution of a packed row, with gradients of x, weight and bias.

        Args:
            x: [tokens, channels].
            weight: [channels, width].
            numbers: see `numbered`.
        """
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            # The kernel reads 16 bytes at a time. `contiguous` would keep the stride of a single token.
            x = x.clone(memory_format=torch.contiguous_format)
        by_channel = x.unsqueeze(0).transpose(1, 2)
        return self._scan(by_channel, weight, bias, numbers, activation=_activation(is_silu)).squeeze(0).t()

    def step(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, is_silu: bool, states: Tensor, slots: Tensor
    ) -> Tensor:
        """Returns the convolution of a token of each sequence [n, channels], and moves the states in their slots.

        Args:
            states: the last inputs, [num_slots, channels, width - 1].
            slots: int64 [n].
        """
        return self._step(x, states, weight, bias, _activation(is_silu), conv_state_indices=slots.int())


def numbered(lengths: list[int], device: torch.device) -> Tensor:
    """Returns the number of each token's sequence in a packed row, int32 [1, tokens]."""
    spare = [*lengths, _SPARE_NUMBERS]
    numbers = torch.arange(len(spare), dtype=torch.int32).repeat_interleave(torch.tensor(spare))
    return numbers.to(device)[None, :-_SPARE_NUMBERS]


def _activation(is_silu: bool) -> str | None:
    return "silu" if is_silu else None

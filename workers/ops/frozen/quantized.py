"""Frozen weights in fewer bits, dequantized for as long as a product with them takes; by itself in 4 bits each (NF4).

Dettmers et al., QLoRA (2023), https://arxiv.org/abs/2305.14314, by bitsandbytes.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..linear import to_product_layout
from .released import ReleasedWeight

# Numbers that share a scale.
_BLOCK = 64


class QuantizedWeight:
    """Holds a weight in blocks of 64 numbers, each with its largest absolute value as float32: 4.5 bits a number."""

    requires_grad = False
    grad = None

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        rows = weight.flatten(0, -2).contiguous()
        self._packed, self._state = bitsandbytes_functional().quantize_4bit(rows, blocksize=_BLOCK, quant_type="nf4")

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self._packed, self._state.absmax

    def dequantize(self) -> Tensor:
        return bitsandbytes_functional().dequantize_4bit(self._packed, self._state).view(self.shape)


class JoinedWeight:
    """Weights of several linear layers of one input as one weight, whose parts stay as they are in memory."""

    requires_grad = False
    grad = None

    def __init__(self, joined: "Sequence[FrozenWeight]") -> None:
        self._joined = joined
        self.shape = torch.Size((sum(each.shape[0] for each in joined), *joined[0].shape[1:]))

    def dequantize(self) -> Tensor:
        return to_product_layout(torch.cat([dequantized(each) for each in self._joined]))


FrozenWeight = Tensor | QuantizedWeight | ReleasedWeight | JoinedWeight


def dequantized(weight: FrozenWeight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def check_installed(option: str, value: str, *need_nothing: str) -> None:
    """Raises ValueError if this value of an option needs a package that is not installed."""
    if value not in need_nothing and find_spec("bitsandbytes") is None:
        raise ValueError(
            f"{option} {value} needs bitsandbytes, which is not installed: pip install 'trainhouse[quantization]'"
        )


def replace_parameter(module: nn.Module, name: str, quantized: QuantizedWeight | ReleasedWeight) -> None:
    """Replaces a parameter of the module by its quantized values, which are no parameter."""
    delattr(module, name)
    setattr(module, name, quantized)


def bitsandbytes_functional() -> Any:
    """Returns bitsandbytes.functional, imported only when it is needed."""
    import bitsandbytes.functional

    return bitsandbytes.functional

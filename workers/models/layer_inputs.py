"""What a pass keeps of each layer for its way back where memory is short: its input alone, from which the layer runs
once more, on the device or in host memory.

Chen et al., Training deep nets with sublinear memory cost (2016), https://arxiv.org/abs/1604.06174.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# A layer of the residual stream: the state and the update that is still to be added to it, and the same behind it.
Layer = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]

# In the surroundings of a layer's forward, wherever it runs again.
Again = Callable[[], AbstractContextManager[None]]


class LayerInputs:
    """Of one pass, in whose way back layers come in the other order, each once."""

    def __init__(self, host: "HostMemory | None", again: Again) -> None:
        """host: None = they stay on the device."""
        self._host, self._again = host, again
        self._kept: dict[int, Tensor] = {}
        self._arriving: dict[int, Tensor] = {}

    def run(self, number: int, layer: Layer, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """A layer with the arithmetic that it has when all is kept. Some of what it takes must want a gradient."""
        return _Checkpointed.apply(hidden, update, self, number, layer)  # pyright: ignore[reportReturnType]

    def keep(self, number: int, x: Tensor) -> None:
        self._kept[number] = x if self._host is None else self._host.away(x)

    def take(self, number: int) -> Tensor:
        """Has that of the layer before come back meanwhile."""
        if self._host is None:
            return self._kept.pop(number)
        for each in (number, number - 1):
            if each in self._kept:
                self._arriving[each] = self._host.back(self._kept.pop(each))
        return self._host.arrived(self._arriving.pop(number))

    def again(self) -> AbstractContextManager[None]:
        return self._again()


class HostMemory:
    """Tensors of a device on their way to host memory and back, beside what the device computes. On the CPU these are
    copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def away(self, x: Tensor) -> Tensor:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=self._stream is not None)
        with self._beside():
            host.copy_(x, non_blocking=True)
        if self._stream is not None:
            x.record_stream(self._stream)
        return host

    def back(self, host: Tensor) -> Tensor:
        """On its way; `arrived` waits for it."""
        with self._beside():
            return host.to(self._device, non_blocking=True)

    def arrived(self, x: Tensor) -> Tensor:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            x.record_stream(torch.cuda.current_stream(self._device))
        return x

    def _beside(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


class _Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, update: Tensor | None, inputs: LayerInputs, number: int, layer: Layer
    ) -> tuple[Tensor, ...]:
        ctx.inputs, ctx.number, ctx.layer, ctx.is_first = inputs, number, layer, update is None
        inputs.keep(number, hidden.detach() if update is None else hidden + update)
        with torch.enable_grad():  # else other kernels run, which round otherwise
            outs = layer(hidden.detach(), None if update is None else update.detach())
        return tuple(out.detach() for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The sum of state and update is kept: to it nothing is added, and both have its gradient."""
        leaf = ctx.inputs.take(ctx.number).requires_grad_()
        nothing = None if ctx.is_first else leaf.new_zeros(()).expand_as(leaf)
        with torch.enable_grad(), ctx.inputs.again():
            torch.autograd.backward(ctx.layer(leaf, nothing), grads)
        return leaf.grad, None if ctx.is_first else leaf.grad, None, None, None

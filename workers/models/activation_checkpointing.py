"""Activation checkpointing: a pass keeps only each layer's input, and runs the layer again for its backward pass.

The inputs stay on the device or go to host memory.

Chen et al., Training deep nets with sublinear memory cost (2016), https://arxiv.org/abs/1604.06174.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# A layer of the residual stream: maps the state, the update not yet added to it, and further inputs to the same pair
# after the layer, and further outputs.
Layer = Callable[..., tuple[Tensor, ...]]

# Restores the context of a layer's forward pass for running it again.
ForwardContext = Callable[[], AbstractContextManager[None]]


class LayerInputs:
    """The layer inputs of one pass. Its backward pass takes them in reverse order, each once."""

    def __init__(self, host: "HostOffload | None", forward_context: ForwardContext) -> None:
        """Keeps inputs in `host`, or on the device if it is None."""
        self._host, self._again = host, forward_context
        self._kept: dict[int, Tensor] = {}
        self._arriving: dict[int, Tensor] = {}

    def run(
        self, number: int, layer: Layer, hidden: Tensor, update: Tensor | None, *others: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Runs a layer with the same arithmetic as without checkpointing.

        At least one of the inputs must require a gradient. The `others` stay on the device.
        """
        return _Checkpointed.apply(hidden, update, self, number, layer, *others)  # pyright: ignore[reportReturnType]

    def keep(self, number: int, x: Tensor) -> None:
        self._kept[number] = x if self._host is None else self._host.to_host(x)

    def take(self, number: int) -> Tensor:
        """Returns a layer's input, and begins to fetch the input of the layer before it."""
        if self._host is None:
            return self._kept.pop(number)
        for each in (number, number - 1):
            if each in self._kept:
                self._arriving[each] = self._host.begin_to_device(self._kept.pop(each))
        return self._host.wait(self._arriving.pop(number))

    def again(self) -> AbstractContextManager[None]:
        return self._again()


class HostOffload:
    """Copies tensors between a device and host memory while the device computes. On the CPU these are plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, x: Tensor) -> Tensor:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=self._stream is not None)
        with self._copy_stream():
            host.copy_(x, non_blocking=True)
        if self._stream is not None:
            x.record_stream(self._stream)
        return host

    def begin_to_device(self, host: Tensor) -> Tensor:
        """Begins to copy a tensor back to the device; `wait` waits for it."""
        with self._copy_stream():
            return host.to(self._device, non_blocking=True)

    def wait(self, x: Tensor) -> Tensor:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            x.record_stream(torch.cuda.current_stream(self._device))
        return x

    def _copy_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


class _Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        update: Tensor | None,
        inputs: LayerInputs,
        number: int,
        layer: Layer,
        *others: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.inputs, ctx.number, ctx.layer, ctx.is_first = inputs, number, layer, update is None
        ctx.save_for_backward(*others)
        inputs.keep(number, hidden.detach() if update is None else hidden + update)
        with torch.enable_grad():  # else other kernels run, which round otherwise
            outs = layer(hidden.detach(), *(None if each is None else each.detach() for each in (update, *others)))
        return tuple(out.detach() for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Runs the layer again on the saved sum of state and update.

        The update is passed as zeros, and the gradient of the sum is that of both.
        """
        leaf = ctx.inputs.take(ctx.number).requires_grad_()
        nothing = None if ctx.is_first else leaf.new_zeros(()).expand_as(leaf)
        needs = ctx.needs_input_grad[-len(ctx.saved_tensors) :]
        others = [
            None if each is None else each.detach().requires_grad_(need)
            for each, need in zip(ctx.saved_tensors, needs, strict=False)
        ]
        with torch.enable_grad(), ctx.inputs.again():
            outs = ctx.layer(leaf, nothing, *others)
            # A choice of tokens, which later layers use, has no gradient.
            learned = [number for number, out in enumerate(outs) if out.requires_grad]
            torch.autograd.backward([outs[number] for number in learned], [grads[number] for number in learned])
        of_others = (None if each is None else each.grad for each in others)
        return leaf.grad, None if ctx.is_first else leaf.grad, None, None, None, *of_others

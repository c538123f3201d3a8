"""Fully sharded layers: of every layer's frozen weights a rank keeps a part, and gathers the others for as long as the
layer runs. Nothing is reduced: frozen weights have no gradients.

Rajbhandari et al., ZeRO (2019), stage 3, https://arxiv.org/abs/1910.02054.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ZeroStage
from .mesh import Arriving, Team


class ShardedLayer:
    """The weights of one layer. Between `gather` and `free` its parameters are whole, else this rank's rows."""

    def __init__(self, layer: nn.Module, names: Sequence[str], team: Team) -> None:
        """names: of the parameters that ranks have parts of, below the layer: the same number of rows each."""
        self._team = team
        self._parameters = [layer.get_parameter(name) for name in names]
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._shard = torch.cat([parameter.data.flatten() for parameter in self._parameters])
        self._arriving: Arriving | None = None
        self._is_whole = True
        self.free()

    @property
    def num_whole_bytes(self) -> int:
        return self._shard.nbytes * self._team.size

    def begin(self) -> None:
        """To gather it, while something else runs. All ranks of the team at once, as `gather`."""
        if not self._is_whole and self._arriving is None:
            self._arriving = self._team.joining(self._shard[None])

    def gather(self) -> None:
        if self._is_whole:
            return
        self.begin()
        assert self._arriving is not None
        whole, self._arriving = self._arriving.wait(), None
        for parameter, shape, part in zip(self._parameters, self._shapes, whole.split(self._sizes, 1), strict=True):
            parameter.data = part.reshape(shape[0] * self._team.size, *shape[1:])
        self._is_whole = True

    def free(self) -> None:
        if not self._is_whole:
            return
        for parameter, shape, part in zip(self._parameters, self._shapes, self._shard.split(self._sizes), strict=True):
            parameter.data = part.view(shape)
        self._is_whole = False


class ShardedLayers:
    """In the order in which they run. While one runs, the weights of the one that comes next arrive."""

    def __init__(self, layers: Sequence[ShardedLayer], zero_stage: ZeroStage = "3") -> None:
        """zero_stage: "3" = a layer is gathered for its forward pass and once more for its backward pass, "2" = it
        stays from the one to the other."""
        self._layers = layers
        self._stays = zero_stage == "2"
        self._are_held = False

    @property
    def num_whole_bytes(self) -> int:
        """Of all layers at once."""
        return sum(layer.num_whole_bytes for layer in self._layers)

    def enter(self, number: int, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Before a layer runs: gathers it, and frees it behind its backward pass. hidden, update: what it takes."""
        if self._are_held or not self._layers:
            return hidden, update
        self._gather(number, number + 1)
        return _passed(self._layers[number].free, hidden, update)

    def leave(self, number: int, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """After it has run: frees it, and gathers it for its backward pass. hidden, update: what it gives.

        The last one's comes at once: it stays.
        """
        if self._are_held or not self._layers:
            return hidden, update
        if not torch.is_grad_enabled() or not (self._stays or number == len(self._layers) - 1):
            self._layers[number].free()
        return _passed(lambda: self._gather(number, number - 1), hidden, update)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, all layers are whole, on all ranks of the team."""
        for number in range(len(self._layers)):
            self._gather(number, number + 1)
        self._are_held = True
        try:
            yield
        finally:
            self._are_held = False
            for layer in self._layers:
                layer.free()

    def _gather(self, number: int, next_one: int) -> None:
        self._layers[number].gather()
        if 0 <= next_one < len(self._layers):
            self._layers[next_one].begin()


def _passed(then: Callable[[], None], hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """then: is called when the gradients of both come back here."""
    return _Passed.apply(then, hidden, update) if torch.is_grad_enabled() else (hidden, update)  # pyright: ignore


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *states: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.then = then
        return tuple(None if state is None else state.view_as(state) for state in states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.then()
        return (None, *grads)

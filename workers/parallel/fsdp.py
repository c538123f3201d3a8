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


class Buffers:
    """What one layer after the other is gathered into.

    Were it freed each time, glibc before 2.38 would not find it again for the next layer, as with all that is aligned:
    a pass of six layers took three times its tensors.
    """

    def __init__(self) -> None:
        self._unused: list[Tensor] = []

    def take(self, like: Tensor, size: int) -> Tensor:
        """[size], of any content."""
        for number, buffer in enumerate(self._unused):
            if len(buffer) == size:
                return self._unused.pop(number)
        return like.new_empty(size)

    def give(self, buffer: Tensor) -> None:
        """Two are kept: of a layer that runs, and of the next one."""
        self._unused = [*self._unused, buffer][-2:]

    def drop(self) -> None:
        self._unused = []


class ShardedLayer:
    """The weights of one layer. Between `gather` and `free` its parameters are whole, else this rank's rows."""

    def __init__(self, layer: nn.Module, names: Sequence[str], team: Team, buffers: Buffers) -> None:
        """names: of the parameters that ranks have parts of, below the layer: the same number of rows each."""
        self._team, self._buffers = team, buffers
        self._parameters = [layer.get_parameter(name) for name in names]
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._shard = torch.cat([parameter.data.flatten() for parameter in self._parameters])
        self._arriving: Arriving | None = None
        self._whole: Tensor | None = None
        self._show_own()

    @property
    def num_whole_bytes(self) -> int:
        return self._shard.nbytes * self._team.size

    def begin(self) -> None:
        """To gather it, while something else runs. All ranks of the team at once, as `gather`."""
        if self._whole is None and self._arriving is None:
            self._arriving = self._team.joining(self._shard[None], self._new_buffer())

    def gather(self) -> None:
        if self._whole is not None:
            return
        self.begin()
        assert self._arriving is not None
        by_rank, self._arriving = self._arriving.wait(), None
        self._whole, num_ranks = self._new_buffer(), self._team.size
        wholes = self._whole.split([num_ranks * size for size in self._sizes])
        of_parameters = zip(self._parameters, self._shapes, by_rank.split(self._sizes, 1), wholes, strict=True)
        for parameter, shape, parts, whole in of_parameters:
            whole.view(num_ranks, -1).copy_(parts)
            parameter.data = whole.view(num_ranks * shape[0], *shape[1:])
        self._buffers.give(by_rank.flatten())

    def free(self) -> None:
        if self._whole is not None:
            self._buffers.give(self._whole)
            self._whole = None
            self._show_own()

    def _new_buffer(self) -> Tensor:
        return self._buffers.take(self._shard, self._team.size * len(self._shard))

    def _show_own(self) -> None:
        for parameter, shape, part in zip(self._parameters, self._shapes, self._shard.split(self._sizes), strict=True):
            parameter.data = part.view(shape)


class ShardedLayers:
    """In the order in which they run. While one runs, the weights of the one that comes next arrive."""

    def __init__(self, layers: Sequence[ShardedLayer], buffers: Buffers, zero_stage: ZeroStage = "3") -> None:
        """buffers: theirs. zero_stage: "3" = a layer is gathered for its forward pass and once more for its backward
        pass, "2" = it stays from the one to the other."""
        self._layers, self._buffers = layers, buffers
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
        return _passed(lambda: self._free(number, is_last=number == 0), hidden, update)

    def leave(self, number: int, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """After it has run: frees it, and gathers it for its backward pass. hidden, update: what it gives.

        The last one's comes at once: it stays.
        """
        if self._are_held or not self._layers:
            return hidden, update
        is_last = number == len(self._layers) - 1
        if not torch.is_grad_enabled():
            self._free(number, is_last)
        elif not (self._stays or is_last):
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
            self._buffers.drop()

    def _gather(self, number: int, next_one: int) -> None:
        self._layers[number].gather()
        if 0 <= next_one < len(self._layers):
            self._layers[next_one].begin()

    def _free(self, number: int, is_last: bool) -> None:
        """is_last: of those that run in this pass, forward or backward."""
        self._layers[number].free()
        if is_last:
            self._buffers.drop()


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

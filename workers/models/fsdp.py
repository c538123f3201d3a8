"""Fully sharded layers: of every layer's weights a rank keeps a part, and gathers the others for as long as the layer
runs. Frozen weights have no gradients; those of others are summed over the ranks as a layer's way back ends, and each
keeps its part. The output head is such a layer, too, for as long as it scores. Rows of the embedding stay where they
are, and those that tokens want are sent (see lookup.py).

Rajbhandari et al., ZeRO (2019), stage 3, https://arxiv.org/abs/1910.02054.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel.mesh import Arriving, Team
from ..protocol.config import ZeroStage


class Buffers:
    """What one layer after the other is gathered into.

    Were it freed each time, glibc before 2.38 would not find it again for the next layer, as with all that is aligned:
    a pass of six layers took three times its tensors.
    """

    def __init__(self) -> None:
        self._unused: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def take(self, like: Tensor, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """[size], of any content, where `like` is. dtype: None = its own."""
        dtype = dtype or like.dtype
        unused = self._unused.get((dtype, size))
        return unused.pop() if unused else like.new_empty(size, dtype=dtype)

    def give(self, buffer: Tensor) -> None:
        """Two of a kind are kept: of a layer that runs, and of the next one."""
        kind = buffer.dtype, len(buffer)
        self._unused[kind] = [*self._unused.get(kind, []), buffer][-2:]

    def drop(self) -> None:
        self._unused = {}


class ShardedLayer:
    """The weights of one layer, of the embedding or of the output head. Between `gather` and `free` its parameters are
    whole, else this rank's rows."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], team: Team, buffers: Buffers) -> None:
        """parameters: of the layer, those that ranks have parts of, by name: the same number of rows each."""
        self._team, self._buffers = team, buffers
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        # Those that it was made with, side by side: they need not be put together to be sent.
        self._shard: Tensor | None = torch.cat([parameter.data.flatten() for parameter in self._parameters])
        parts = self._shard.split(self._sizes)
        self._parts = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        self._gradients: list[Tensor] | None = None
        self._arriving: Arriving | None = None
        self._whole: Tensor | None = None
        self._whole_gradient: Tensor | None = None
        self._show_own()

    @property
    def num_whole_bytes(self) -> int:
        return self._num_whole * self._parts[0].itemsize

    @contextmanager
    def of_other_weights(self, gradients: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Inside, its weights are those that its parameters have on entering, this rank's rows. gradients: by name,
        to which this rank's parts of those by the weights are added, float32; without its names they stay frozen."""
        before = self._parts, self._shard
        self._parts, self._shard = [parameter.data for parameter in self._parameters], None
        learned = gradients if gradients is not None and gradients.keys() >= {*self._names} else None
        self._gradients = None if learned is None else [learned[name] for name in self._names]
        try:
            yield
        finally:
            self.free()
            self._arriving = self._gradients = None
            self._parts, self._shard = before
            self._show_own()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside it is whole, and so are gradients by it, which are shared out in the end. All of the team at once."""
        before = [parameter.grad for parameter in self._parameters]
        self.gather()
        self.collect()
        try:
            yield
            self.share_gradients()
        finally:
            self.drop()
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient

    def begin(self) -> None:
        """To gather it, while something else runs. All ranks of the team at once, as `gather`."""
        if self._whole is None and self._arriving is None:
            shard = self._shard if self._shard is not None else torch.cat([part.flatten() for part in self._parts])
            self._arriving = self._team.joining(shard[None], self._new_buffer())

    def gather(self) -> None:
        if self._whole is not None:
            return
        self.begin()
        assert self._arriving is not None
        by_rank, self._arriving = self._arriving.wait().flatten(), None
        self._whole = self._sorted_by_parameter(by_rank)
        for parameter, whole in zip(self._parameters, self._by_parameter(self._whole), strict=True):
            parameter.data = whole

    def collect(self) -> None:
        """Of a layer that is whole: from now on backward passes add to gradients of whole weights."""
        if self._gradients is None:
            return
        self._whole_gradient = self._new_buffer(torch.float32).zero_()
        for parameter, gradient in zip(self._parameters, self._by_parameter(self._whole_gradient), strict=True):
            parameter.grad = gradient

    def share_gradients(self) -> None:
        """Adds to this rank's parts of the gradients the sum over all ranks. All of the team at once."""
        if self._gradients is None or self._whole_gradient is None:
            return
        by_rank, self._whole_gradient = self._sorted_by_rank(self._whole_gradient), None
        own = self._team.summed_part(by_rank.view(self._team.size, -1)).split(self._sizes, 1)
        for total, part in zip(self._gradients, own, strict=True):
            total.add_(part.view(total.shape))
        for parameter in self._parameters:
            parameter.grad = None
        self._buffers.give(by_rank)

    def free(self) -> None:
        if self._whole is not None:
            self._buffers.give(self._whole)
            self._whole = self._whole_gradient = None
            self._show_own()

    def drop(self) -> None:
        """Frees it, and the memory that it was gathered into: no other layer is to come there."""
        self.free()
        self._buffers.drop()

    @property
    def _num_whole(self) -> int:
        return self._team.size * sum(self._sizes)

    def _new_buffer(self, dtype: torch.dtype | None = None) -> Tensor:
        return self._buffers.take(self._parts[0], self._num_whole, dtype)

    def _sorted_by_parameter(self, by_rank: Tensor) -> Tensor:
        """What one rank has behind what another has -> all of one parameter behind all of another. Of a single one that
        is the same, in the same memory."""
        if len(self._parameters) == 1:
            return by_rank
        whole = self._new_buffer(by_rank.dtype)
        for of_one, parts in self._places(whole, by_rank):
            of_one.copy_(parts)
        self._buffers.give(by_rank)
        return whole

    def _sorted_by_rank(self, whole: Tensor) -> Tensor:
        """The other way round."""
        if len(self._parameters) == 1:
            return whole
        by_rank = self._new_buffer(whole.dtype)
        for of_one, parts in self._places(whole, by_rank):
            parts.copy_(of_one)
        self._buffers.give(whole)
        return by_rank

    def _places(self, whole: Tensor, by_rank: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each parameter, in both [ranks, size of a part]."""
        num_ranks = self._team.size
        parts = by_rank.view(num_ranks, -1).split(self._sizes, 1)
        for of_one, part in zip(self._by_parameter(whole), parts, strict=True):
            yield of_one.view(num_ranks, -1), part

    def _by_parameter(self, buffer: Tensor) -> Iterator[Tensor]:
        """As whole parameters."""
        num_ranks = self._team.size
        for shape, part in zip(self._shapes, buffer.split([num_ranks * size for size in self._sizes]), strict=True):
            yield part.view(num_ranks * shape[0], *shape[1:])

    def _show_own(self) -> None:
        for parameter, part in zip(self._parameters, self._parts, strict=True):
            parameter.data = part


class ShardedLayers:
    """In the order in which they run. While one runs, the weights of the one that comes next arrive."""

    def __init__(
        self,
        layers: Sequence[ShardedLayer],
        zero_stage: ZeroStage = "3",
        ends: Sequence[ShardedLayer] = (),
    ) -> None:
        """zero_stage: "3" = a layer is gathered for its forward pass and once more for its backward pass, "2" = it
        stays from the one to the other. ends: what lies before and behind them, of which passes see to themselves."""
        self._layers, self._ends = layers, ends
        self._stays = zero_stage == "2"
        self._are_held = False

    @property
    def num_whole_bytes(self) -> int:
        """Of all of them at once."""
        return sum(layer.num_whole_bytes for layer in (*self._layers, *self._ends))

    def enter(self, number: int, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Before a layer runs: gathers it, and frees it behind its backward pass. hidden, update: what it takes."""
        if self._are_held or not self._layers:
            return hidden, update
        self._gather(number, number + 1)
        return _passed(lambda: self._end_backward(number), hidden, update)

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
        return _passed(lambda: self._begin_backward(number), hidden, update)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, all of them are whole, on all ranks of the team."""
        for number in range(len(self._layers)):
            self._gather(number, number + 1)
        for end in self._ends:
            end.gather()
        self._are_held = True
        try:
            yield
        finally:
            self._are_held = False
            for layer in (*self._layers, *self._ends):
                layer.drop()

    @contextmanager
    def of_other_weights(self, gradients: Mapping[str, Tensor] | None) -> Iterator[None]:
        """See ShardedLayer."""
        with ExitStack() as held:
            for layer in (*self._layers, *self._ends):
                held.enter_context(layer.of_other_weights(gradients))
            yield

    def _begin_backward(self, number: int) -> None:
        self._gather(number, number - 1)
        self._layers[number].collect()

    def _end_backward(self, number: int) -> None:
        self._layers[number].share_gradients()
        self._free(number, is_last=number == 0)

    def _gather(self, number: int, next_one: int) -> None:
        self._layers[number].gather()
        if 0 <= next_one < len(self._layers):
            self._layers[next_one].begin()

    def _free(self, number: int, is_last: bool) -> None:
        """is_last: of those that run in this pass, forward or backward."""
        if is_last:
            self._layers[number].drop()
        else:
            self._layers[number].free()


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

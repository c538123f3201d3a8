"""Fully sharded layers: each rank keeps a part of every layer's weights, and gathers the rest while the layer runs.

Frozen weights have no gradients; other gradients are reduced over the ranks when a layer's backward pass ends, and each
rank keeps its part. The output head is such a layer too, while it scores. The embedding is not gathered: its rows that
tokens need are sent (see parallel/sharded_embedding.py).

Rajbhandari et al., ZeRO (2019), stage 3, https://arxiv.org/abs/1910.02054.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel.mesh import PendingCollective, Team
from ..protocol.worker_config import ZeroStage


class GatherBuffers:
    """Memory into which one layer after the other is gathered.

    If it were freed each time, glibc before 2.38 would not reuse it for the next layer, since it is an aligned
    allocation: a pass of six layers took three times the memory of its tensors.
    """

    def __init__(self) -> None:
        self._unused: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def take(self, like: Tensor, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a buffer [size] of arbitrary content on the device of `like`, with its dtype if none is given."""
        dtype = dtype or like.dtype
        unused = self._unused.get((dtype, size))
        return unused.pop() if unused else like.new_empty(size, dtype=dtype)

    def release(self, buffer: Tensor) -> None:
        """Returns a buffer for reuse. Two of a kind are kept: for the running layer and for the next one."""
        kind = buffer.dtype, len(buffer)
        self._unused[kind] = [*self._unused.get(kind, []), buffer][-2:]

    def clear(self) -> None:
        self._unused = {}


class ShardedLayer:
    """The weights of one layer, of the embedding or of the output head.

    Between `gather` and `free` its parameters are whole, otherwise they are this rank's rows.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], team: Team, buffers: GatherBuffers) -> None:
        """Concatenates this rank's parts of the parameters, given by name. All ranks have equally many rows of each."""
        self._team, self._buffers = team, buffers
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        # The initial parts in one tensor, which can be sent without concatenating them first.
        self._shard: Tensor | None = torch.cat([parameter.data.flatten() for parameter in self._parameters])
        parts = self._shard.split(self._sizes)
        self._parts = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        self._gradients: list[Tensor] | None = None
        self._arriving: PendingCollective | None = None
        self._whole: Tensor | None = None
        self._whole_gradient: Tensor | None = None
        self._show_own()

    @property
    def num_whole_bytes(self) -> int:
        return self._num_whole * self._parts[0].itemsize

    @contextmanager
    def using_weights(self, gradients: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Uses the weights that the parameters have on entry, this rank's rows, while inside.

        Args:
            gradients: float32, by name; this rank's parts of the weights' gradients are added to them. If the layer's
                names are missing, its weights stay frozen.
        """
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
        """Keeps the layer and its gradients whole while inside; the gradients are reduced at the end.

        All ranks of the team enter at the same time.
        """
        before = [parameter.grad for parameter in self._parameters]
        self.gather()
        self.begin_gradients()
        try:
            yield
            self.reduce_scatter_gradients()
        finally:
            self.free_buffers()
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient

    def begin_gather(self) -> None:
        """Begins to gather the layer while something else runs.

        All ranks of the team call it together, like `gather`.
        """
        if self._whole is None and self._arriving is None:
            shard = self._shard if self._shard is not None else torch.cat([part.flatten() for part in self._parts])
            self._arriving = self._team.start_all_gather(shard[None], self._new_buffer())

    def gather(self) -> None:
        if self._whole is not None:
            return
        self.begin_gather()
        assert self._arriving is not None
        by_rank, self._arriving = self._arriving.wait().flatten(), None
        self._whole = self._sorted_by_parameter(by_rank)
        for parameter, whole in zip(self._parameters, self._by_parameter(self._whole), strict=True):
            parameter.data = whole

    def begin_gradients(self) -> None:
        """Makes backward passes of the whole layer add to gradients of whole weights from now on."""
        if self._gradients is None:
            return
        self._whole_gradient = self._new_buffer(torch.float32).zero_()
        for parameter, gradient in zip(self._parameters, self._by_parameter(self._whole_gradient), strict=True):
            parameter.grad = gradient

    def reduce_scatter_gradients(self) -> None:
        """Adds the sum of the gradients over all ranks to this rank's parts. All ranks of the team call it together."""
        if self._gradients is None or self._whole_gradient is None:
            return
        by_rank, self._whole_gradient = self._sorted_by_rank(self._whole_gradient), None
        own = self._team.reduce_scatter(by_rank.view(self._team.size, -1)).split(self._sizes, 1)
        for total, part in zip(self._gradients, own, strict=True):
            total.add_(part.view(total.shape))
        for parameter in self._parameters:
            parameter.grad = None
        self._buffers.release(by_rank)

    def free(self) -> None:
        if self._whole is not None:
            self._buffers.release(self._whole)
            self._whole = self._whole_gradient = None
            self._show_own()

    def free_buffers(self) -> None:
        """Frees the layer and the buffers it was gathered into, because no other layer needs them."""
        self.free()
        self._buffers.clear()

    @property
    def _num_whole(self) -> int:
        return self._team.size * sum(self._sizes)

    def _new_buffer(self, dtype: torch.dtype | None = None) -> Tensor:
        return self._buffers.take(self._parts[0], self._num_whole, dtype)

    def _sorted_by_parameter(self, by_rank: Tensor) -> Tensor:
        """Reorders a buffer from rank after rank to parameter after parameter.

        With a single parameter the order is the same, and so is the memory.
        """
        if len(self._parameters) == 1:
            return by_rank
        whole = self._new_buffer(by_rank.dtype)
        for of_one, parts in self._places(whole, by_rank):
            of_one.copy_(parts)
        self._buffers.release(by_rank)
        return whole

    def _sorted_by_rank(self, whole: Tensor) -> Tensor:
        if len(self._parameters) == 1:
            return whole
        by_rank = self._new_buffer(whole.dtype)
        for of_one, parts in self._places(whole, by_rank):
            parts.copy_(of_one)
        self._buffers.release(whole)
        return by_rank

    def _places(self, whole: Tensor, by_rank: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each parameter's numbers in both buffers, [ranks, size of a part]."""
        num_ranks = self._team.size
        parts = by_rank.view(num_ranks, -1).split(self._sizes, 1)
        for of_one, part in zip(self._by_parameter(whole), parts, strict=True):
            yield of_one.view(num_ranks, -1), part

    def _by_parameter(self, buffer: Tensor) -> Iterator[Tensor]:
        num_ranks = self._team.size
        for shape, part in zip(self._shapes, buffer.split([num_ranks * size for size in self._sizes]), strict=True):
            yield part.view(num_ranks * shape[0], *shape[1:])

    def _show_own(self) -> None:
        for parameter, part in zip(self._parameters, self._parts, strict=True):
            parameter.data = part


class ShardedLayers:
    """The sharded layers in the order in which they run. While one runs, the weights of the next one arrive."""

    def __init__(
        self,
        layers: Sequence[ShardedLayer],
        zero_stage: ZeroStage = "3",
        embedding_and_head: Sequence[ShardedLayer] = (),
    ) -> None:
        """Stores the layers in order.

        Args:
            zero_stage: "3" gathers a layer for its forward pass and again for its backward pass; "2" keeps it in
                between.
            embedding_and_head: the embedding and the output head, which passes gather themselves.
        """
        self._layers, self._ends = layers, embedding_and_head
        self._keeps_for_backward = zero_stage == "2"
        self._are_held = False

    @property
    def num_whole_bytes(self) -> int:
        """Bytes of all layers gathered at the same time."""
        return sum(layer.num_whole_bytes for layer in (*self._layers, *self._ends))

    def before_layer(self, number: int, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Gathers a layer before it runs, and makes the end of its backward pass free it.

        Returns the layer's inputs.
        """
        if self._are_held or not self._layers:
            return hidden, update
        self._gather(number, number + 1)
        return _with_backward_hook(lambda: self._end_backward(number), hidden, update)

    def after_layer(self, number: int, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Frees a layer after it ran, and makes its backward pass gather it. Returns the layer's outputs.

        The last layer stays gathered, because its backward pass follows at once.
        """
        if self._are_held or not self._layers:
            return hidden, update
        is_last = number == len(self._layers) - 1
        if not torch.is_grad_enabled():
            self._free(number, is_last)
        elif not (self._keeps_for_backward or is_last):
            self._layers[number].free()
        return _with_backward_hook(lambda: self._begin_backward(number), hidden, update)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keeps all layers whole while inside, on all ranks of the team."""
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
                layer.free_buffers()

    @contextmanager
    def using_weights(self, gradients: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Enters ShardedLayer.using_weights of all layers."""
        with ExitStack() as held:
            for layer in (*self._layers, *self._ends):
                held.enter_context(layer.using_weights(gradients))
            yield

    def _begin_backward(self, number: int) -> None:
        self._gather(number, number - 1)
        self._layers[number].begin_gradients()

    def _end_backward(self, number: int) -> None:
        self._layers[number].reduce_scatter_gradients()
        self._free(number, is_last=number == 0)

    def _gather(self, number: int, next_one: int) -> None:
        self._layers[number].gather()
        if 0 <= next_one < len(self._layers):
            self._layers[next_one].begin_gather()

    def _free(self, number: int, is_last: bool) -> None:
        if is_last:
            self._layers[number].free_buffers()
        else:
            self._layers[number].free()


def _with_backward_hook(
    then: Callable[[], None], hidden: Tensor, update: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns both states; `then` is called when the gradients of both are computed."""
    return _BackwardHook.apply(then, hidden, update) if torch.is_grad_enabled() else (hidden, update)  # pyright: ignore


class _BackwardHook(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *states: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.then = then
        return tuple(None if state is None else state.view_as(state) for state in states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.then()
        return (None, *grads)

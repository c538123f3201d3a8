"""The state-space recurrence of Mamba-2: the state of a head is a matrix that decays, and outer products are added.

With a time step dt, a token changes the state S [head_dim, state_dim] to exp(a dt) S + dt x b', and its output is
S c + skip x: Dao and Gu, Transformers are SSMs (2024), sections 6 and 7, https://arxiv.org/abs/2405.21060.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..attention import Packing
from ..libraries.probe import Comparison, probed, random_on, report_misfit
from ..libraries.state_space import MambaSsm
from ..recurrence import StateKind
from .chunks import Chunks
from .comparison import LENGTHS, compare_recurrence

CHUNK_SIZES = (16, 32, 64, 128)


class StateSpaceInputs(NamedTuple):
    """The inputs of the recurrence for each token.

    x: [tokens, heads, head_dim]. dt: the time steps, float32 [tokens, heads]. b, c: what writes to states and what
    reads them, [tokens, groups, state_dim]; each group serves consecutive heads.
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor


class Batches:
    """Divides the sequences of a packed row into batches for kernels, and fills shorter ones up with zeros.

    A sequence has at least half the tokens of the longest one of its batch, so that at most half of them are filled up.

    shapes: sequences and tokens of each batch.
    """

    def __init__(self, packing: Packing, device: torch.device, _size: int) -> None:
        lengths, members = packing.lengths, _divided(packing.lengths)
        self.shapes = [(len(own), lengths[own[0]]) for own in members]
        self._sizes = [count * longest for count, longest in self.shapes]
        order = [i for own in members for i in own]
        self._order = torch.tensor(order, device=device)
        self._ranks = self._order.argsort()
        starts = dict(zip(order, accumulate((s for n, s in self.shapes for _ in range(n)), initial=0), strict=False))
        places = torch.cat([torch.arange(starts[i], starts[i] + length) for i, length in enumerate(lengths)])
        is_row = sum(self._sizes) == len(places) and order == sorted(order)
        self._places = None if is_row else places.to(device)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Maps x [tokens, ...] to batches [sequences, tokens, ...]."""
        if self._places is not None:
            x = x.new_zeros(sum(self._sizes), *x.shape[1:]).index_copy_(0, self._places, x)
        return [own.unflatten(0, shape) for own, shape in zip(x.split(self._sizes), self.shapes, strict=True)]

    def join(self, batches: Sequence[Tensor]) -> Tensor:
        """Maps batches [sequences, tokens, ...] to [tokens, ...]."""
        x = torch.cat([own.flatten(0, 1) for own in batches])
        return x if self._places is None else x.index_select(0, self._places)

    def split_states(self, states: Tensor) -> Sequence[Tensor]:
        """Maps states [sequences, ...] of the row to those of each batch."""
        return states.index_select(0, self._order).split([count for count, _ in self.shapes])

    def join_states(self, batches: Sequence[Tensor]) -> Tensor:
        """Maps states of each batch, [sequences, ...], to those of the row."""
        return torch.cat(list(batches)).index_select(0, self._ranks)


def _divided(lengths: Sequence[int]) -> list[list[int]]:
    """Returns the indices of the sequences of each batch, the longest ones first."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or 2 * lengths[i] < lengths[batches[-1][0]]:
            batches.append([])
        batches[-1].append(i)
    return batches


@dataclass(frozen=True)
class StateSpace:
    """The state-space recurrence of a layer, a Recurrence of StateSpaceInputs.

    The output has x's shape and dtype; the arithmetic is in float32. On a GPU bfloat16 runs as kernels of mamba-ssm, if
    that is installed.

    a: the logarithm of a state's decay in a time of 1, negative, float32 [heads]. skip: [heads].
    """

    layer: int
    head_dim: int
    state_dim: int
    a: Tensor
    skip: Tensor

    @property
    def state(self) -> StateKind:
        return StateKind(self.layer, "state_space", (len(self.a), self.head_dim, self.state_dim), torch.float32)

    def scan(self, inputs: Sequence[Tensor], packing: Packing, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.scan_by(self._library_for(inputs[0]), inputs, packing, initial)

    def scan_by(
        self,
        library: MambaSsm | None,
        inputs: Sequence[Tensor],
        packing: Packing,
        initial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes `scan` by the library, or by torch's operations if there is none."""
        row = StateSpaceInputs(*inputs)
        if library is not None:
            return self._scan_batches(library, row, packing.layout(Batches, row.x.device, 0), initial)
        chunks = packing.layout(_chunks, row.x.device, self.head_dim * self.state_dim)
        if torch.is_grad_enabled():
            assert initial is None
            return _Scan.apply(*row, self.a, self.skip, chunks)  # pyright: ignore[reportReturnType]
        out, final, _ = _scan(_ChunkedRow(row, self.a, chunks), self.skip, initial)
        return out, final

    def _scan_batches(
        self, library: MambaSsm, row: StateSpaceInputs, batches: Batches, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        before = [None] * len(batches.shapes) if initial is None else batches.split_states(initial)
        inputs = zip(*(batches.split(x) for x in row), strict=True)
        outs, states = zip(
            *(library.scan(own, self.a, self.skip, state) for own, state in zip(inputs, before, strict=True)),
            strict=True,
        )
        return batches.join(outs), batches.join_states([state.detach() for state in states])

    def step(self, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor:
        return self.step_by(self._library_for(inputs[0]), inputs, states, slots)

    def step_by(self, library: MambaSsm | None, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor:
        """Computes `step` by the library, or by torch's operations if there is none."""
        x, dt, b, c = StateSpaceInputs(*inputs)
        if library is not None:
            return library.step((x, dt, b, c), self.a, self.skip, states, slots)
        groups = b.shape[1]
        state = states.index_select(0, slots).mul_((dt * self.a).exp_()[:, :, None, None])
        written = (x * dt.unsqueeze(2)).unflatten(1, (groups, -1)).unsqueeze(4)
        state.unflatten(1, (groups, -1)).addcmul_(written, b.float()[:, :, None, None])
        states.index_copy_(0, slots, state)
        out = (state.view(len(x), groups, -1, self.state_dim) @ c.float().unsqueeze(3)).view(x.shape)
        return out.addcmul_(x, self.skip.unsqueeze(1)).to(x.dtype)

    def _library_for(self, x: Tensor) -> MambaSsm | None:
        if not x.is_cuda:
            return None
        if (reason := MambaSsm.misfit(x)) is not None:
            report_misfit(MambaSsm, x.device, reason)
            return None
        return mamba_ssm_on(x.device, self.head_dim, self.state_dim)


@cache
def mamba_ssm_on(device: torch.device, head_dim: int, state_dim: int) -> MambaSsm | None:
    """Returns mamba-ssm if it computes the same on the device as torch's operations, for states of this shape.

    It tunes its kernels by measurement for each shape of states, and does it here.
    """
    return probed(MambaSsm, device, partial(compare_state_space, head_dim=head_dim, state_dim=state_dim))


def compare_state_space(
    library: MambaSsm, device: torch.device, head_dim: int, state_dim: int, lengths: Sequence[int] = LENGTHS
) -> Iterator[Comparison]:
    """Compares two groups of four heads each."""
    draw, tokens, heads = random_on(device), sum(lengths), 8
    a, skip = draw(heads).float().exp().neg().requires_grad_(), draw(heads).requires_grad_()
    x, b, c = draw(tokens, heads, head_dim), draw(tokens, 2, state_dim), draw(tokens, 2, state_dim)
    inputs = [x, softplus(draw(tokens, heads).float() - 1), b, c]
    return compare_recurrence(StateSpace(0, head_dim, state_dim, a, skip), library, inputs, [a, skip], lengths)


def _chunks(packing: Packing, device: torch.device, numbers: int) -> Chunks:
    """Chooses the size by the work for all tokens, filled up: pairs of tokens, products with states of so many numbers,
    and passes over the states of all chunks."""

    def work(size: int) -> float:
        filled = sum(group.count * -(-group.length // size) * size for group in packing.groups)
        return filled * (size + numbers / 256 + numbers / (3 * size))

    return Chunks(packing, device, min(CHUNK_SIZES, key=work))


class _ChunkedRow:
    """The inputs in chunks, float32, and the decays within them.

    With g groups, r heads in each, and chunks of n tokens: written [chunks, g, n, r, head_dim], x times dt; b and c
    [chunks, g, n, state_dim]; growth and to_end [chunks, g, n, r, 1]: the decay from the chunk's start to a token's
    output, and from a token to the chunk's end; over_chunk [chunks, g, r, 1, 1]: the decay over all of it; decay
    [chunks, g, r, n, n]: from a token (column) to a later one (row), else 0; products [chunks, g, n, n] of c and b.
    """

    def __init__(self, row: StateSpaceInputs, a: Tensor, chunks: Chunks) -> None:
        self.row, self.a, self.chunks, self.groups = row, a, chunks, row.b.shape[1]
        dt = self.by_group(row.dt.unsqueeze(2))
        self.written = self.by_group(row.x).mul_(dt)
        self.b, self.c = chunks.split(row.b).float(), chunks.split(row.c).float()
        # In float64, since a single token may decay a state to nothing, and then the differences would be inexact.
        log_decay = (dt * a.view(self.groups, 1, -1, 1)).double().cumsum_(2)
        self.growth, self.to_end = log_decay.float().exp_(), (log_decay[:, :, -1:] - log_decay).float().exp_()
        self.over_chunk = self.growth[:, :, -1].unsqueeze(4)
        by_head = log_decay.transpose(2, 3)
        later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=a.device).triu_(1)
        self.decay = (by_head - by_head.mT).float().masked_fill_(later, float("-inf")).exp_()
        self.products = self.c @ self.b.mT

    def by_group(self, x: Tensor) -> Tensor:
        """Maps x [tokens, heads, features] to float32 [chunks, g, n, r, features], 0 for the tokens that fill up."""
        out = self.chunks.split(x.unflatten(1, (self.groups, -1)).flatten(2)).float()
        out = out if self.chunks.fill is None else out.masked_fill_(self.chunks.fill, 0)
        return out.unflatten(-1, (-1, x.shape[2]))

    def weights(self) -> Tensor:
        """Returns what each token's output has of the written values, [chunks, g, r, n, n]."""
        return self.products.unsqueeze(2) * self.decay

    def states_written(self, which: slice) -> Tensor:
        """Returns what some of the chunks add to the states at their ends, [chunks, g, r * head_dim, state_dim]."""
        return (self.written[which] * self.to_end[which]).flatten(3).mT @ self.b[which]

    def read(self, states: Tensor, which: slice) -> Tensor:
        """Returns what tokens read from the states at the starts of some of the chunks, [chunks, g, n, r, head_dim], if
        these did not decay until then; states: [chunks, g, r * head_dim, state_dim]."""
        return (self.c[which] @ states.mT).unflatten(3, self.written.shape[3:])

    def decayed(self, states: Tensor, chunks: slice) -> Tensor:
        """Returns states [chunks, g, r * head_dim, state_dim] at the ends of chunks, given those at their starts."""
        return (states.unflatten(2, self.written.shape[3:]) * self.over_chunk[chunks]).flatten(2, 3)


class _Scan(torch.autograd.Function):
    """Keeps the inputs and the states at the chunks' starts; backward computes the rest again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, skip: Tensor, chunks: Chunks
    ) -> tuple[Tensor, Tensor]:
        out, final, states = _scan(_ChunkedRow(StateSpaceInputs(x, dt, b, c), a, chunks), skip, None)
        ctx.save_for_backward(x, dt, b, c, a, skip, states)
        ctx.chunks = chunks
        ctx.mark_non_differentiable(final)
        return out, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *row, a, skip, states = ctx.saved_tensors
        gradients = _Gradients(_ChunkedRow(StateSpaceInputs(*row), a, ctx.chunks), states, grads[0])
        return *gradients.of_inputs(skip), None


def _scan(s: _ChunkedRow, skip: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output, the states after the row, and those at the starts of the chunks that have earlier tokens."""
    states, final = _advance(s, initial)
    out = s.weights() @ s.written.transpose(2, 3)
    later = slice(len(out) - len(states), None)
    if len(states):
        out[later] += (s.read(states, later) * s.growth[later]).transpose(2, 3)
    x, chunks = s.row.x, s.chunks
    joined = chunks.join(out.flatten(1, 2)).addcmul_(x, skip.unsqueeze(1)).to(x.dtype)
    final = final.index_select(0, chunks.ranks).unflatten(2, s.written.shape[3:]).flatten(1, 2)
    return joined, final, states


def _advance(s: _ChunkedRow, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Advances the states from chunk to chunk.

    Returns:
        the states at the starts of the chunks that have earlier tokens, and the last ones in the order of
        `chunks.order`, both [.., g, r * head_dim, state_dim].
    """
    steps = s.chunks.steps
    if initial is None:
        fresh, steps = steps[0].stop, steps[1:]
        state = s.states_written(slice(0, fresh))
    else:
        fresh = 0
        state = initial.float().index_select(0, s.chunks.order).unflatten(1, (s.groups, -1)).flatten(2, 3)
    # What each chunk writes; then the state at its start takes its place.
    states = s.states_written(slice(fresh, None))
    for step in steps:
        here, current = states[step.start - fresh : step.stop - fresh], state[: step.stop - step.start]
        after = here + s.decayed(current, step)
        here.copy_(current)
        current.copy_(after)
    return states, state


class _Gradients:
    """Computes the gradients of the inputs, given that of the output of `_scan` and the states that it returned."""

    def __init__(self, s: _ChunkedRow, states: Tensor, grad: Tensor) -> None:
        self._s, self._states, self._flat_grad = s, states, grad.float()
        self._later = slice(len(s.b) - len(states), None)
        self._grad = s.by_group(self._flat_grad)

    def of_inputs(self, skip: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of x, dt, b, c, a and skip."""
        s, row = self._s, self._s.row
        of_written, of_b, of_c, of_log = self._of_pairs()
        if len(self._states):
            of_starts = self._go_back()
            self._add_of_readers(of_c, of_log)
            self._add_of_ends(of_starts, of_written, of_b, of_log)
        join = s.chunks.join
        of_written = join(of_written.flatten(1, 2))
        of_decay = join(of_log.flip(-1).cumsum(-1).flip(-1).flatten(1, 2).unsqueeze(3)).squeeze(2)
        of_dt = torch.linalg.vecdot(of_written, row.x.float()).addcmul_(of_decay, s.a)
        of_x = of_written.mul_(row.dt.unsqueeze(2)).addcmul_(self._flat_grad, skip.unsqueeze(1))
        of_skip = torch.linalg.vecdot(self._flat_grad, row.x.float()).sum(0)
        of_a = torch.linalg.vecdot(of_decay, row.dt, dim=0)
        return of_x.to(row.x.dtype), of_dt, join(of_b).to(row.b.dtype), join(of_c).to(row.c.dtype), of_a, of_skip

    def _of_pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns gradients by pairs of tokens in a chunk: of `written` and of the logarithm of the decay until each
        token, both by head, [chunks, g, r, n, ..], and of b and c."""
        s, weights, grad = self._s, self._s.weights(), self._grad.transpose(2, 3).contiguous()
        of_written = weights.mT @ grad
        of_weights = grad @ s.written.transpose(2, 3).mT
        along = weights.mul_(of_weights)
        # A token's own value does not decay until its output; as a difference of two sums that would be inexact.
        along.diagonal(dim1=-2, dim2=-1).zero_()
        of_log = along.sum(-1).sub_(along.sum(-2))
        of_products = of_weights.mul_(s.decay).sum(2)
        return of_written, of_products.mT @ s.c, of_products @ s.b, of_log

    def _go_back(self) -> Tensor:
        """Returns the gradients of the states at the starts of chunks, shaped like them."""
        s, fresh = self._s, self._later.start
        decayed = (self._grad[self._later] * s.growth[self._later]).flatten(3)
        of_starts = decayed.mT @ s.c[self._later]
        for before, step in reversed(list(pairwise(s.chunks.steps[1:]))):
            count = step.stop - step.start
            here = slice(before.start - fresh, before.start - fresh + count)
            of_ends = of_starts[step.start - fresh : step.stop - fresh]
            of_starts[here] += s.decayed(of_ends, slice(before.start, before.start + count))
        return of_starts

    def _add_of_readers(self, of_c: Tensor, of_log: Tensor) -> None:
        """Adds the gradients by what tokens read from the states at their chunks' starts."""
        s, later = self._s, self._later
        grad = self._grad[later] * s.growth[later]
        of_c[later] += grad.flatten(3) @ self._states
        of_log[later] += torch.linalg.vecdot(grad, s.read(self._states, later)).mT

    def _add_of_ends(self, of_starts: Tensor, of_written: Tensor, of_b: Tensor, of_log: Tensor) -> None:
        """Adds the gradients by what tokens write to the states at their chunks' ends, which are later chunks' starts.

        Args:
            of_starts: the gradients of the states at the starts of chunks.
        """
        s, steps = self._s, self._s.chunks.steps
        before = [i for one, two in pairwise(steps) for i in range(one.start, one.start + two.stop - two.start)]
        chunks = torch.tensor(before, device=of_starts.device)
        heads, to_end = s.written.shape[3:], s.to_end[chunks]
        written = s.written[chunks].mul_(to_end)
        of_b.index_add_(0, chunks, written.flatten(3) @ of_starts)
        of_decayed = (s.b[chunks] @ of_starts.mT).unflatten(3, heads)
        along = torch.linalg.vecdot(written, of_decayed).mT.neg_()
        along[..., -1] += (self._states * of_starts).unflatten(2, heads).sum((-1, -2))
        of_log.index_add_(0, chunks, along)
        of_written.index_add_(0, chunks, of_decayed.mul_(to_end).transpose(2, 3))

"""The gated delta rule over a packed row, in chunks, with its gradients.

Within a chunk the corrections of all tokens are the solution of a triangular system, and all else are matrix products:
Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024), https://arxiv.org/abs/2406.06484, and Gated
Delta Networks (2024), section 3.3, https://arxiv.org/abs/2412.06464.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention import Packing
from .chunks import Chunks

CHUNK_SIZES = (16, 32, 64)
_EPS = 1e-6
_BLOCK = 8


class DeltaInputs(NamedTuple):
    """The inputs of the gated delta rule for each token.

    q, k: [tokens, key_heads, key_dim], normalized to length 1 by the rule. v: [tokens, value_heads, value_dim]; each
    key head serves consecutive value heads. g: the logarithm of the decay, at most 0, float32 [tokens, value_heads].
    beta: how far the value is corrected, [tokens, value_heads].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def scan_chunks(row: DeltaInputs, packing: Packing, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes Recurrence.scan: returns the output, of v's shape and dtype, and the states after the row."""
    chunks = packing.layout(_chunks, row.v.device, row.k.shape[2])
    if torch.is_grad_enabled():
        assert initial is None
        return _Scan.apply(*row, chunks)  # pyright: ignore[reportReturnType]
    out, final, _ = _scan(_System(row, chunks), initial)
    return out, final


def normalize(x: Tensor, length: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns x [..., features] scaled to this length, and what it was multiplied by, float32 [..., 1]."""
    wide = x.float()
    factor = torch.linalg.vecdot(wide, wide).add_(_EPS).rsqrt_().mul_(length).unsqueeze(-1)
    return wide * factor, factor


def _length_gradient(grad: Tensor, x: Tensor, factor: Tensor, length: float = 1.0) -> Tensor:
    """Returns the gradient of the input of `normalize`, given that of its output x; overwrites grad."""
    along = torch.linalg.vecdot(grad, x).mul_(-(length**-2)).unsqueeze(-1)
    return grad.addcmul_(x, along).mul_(factor)


def _chunks(packing: Packing, device: torch.device, dim: int) -> Chunks:
    """Chooses the size by the work for all tokens, filled up: products, and reading and writing a state per chunk."""

    def work(size: int) -> float:
        filled = sum(group.count * -(-group.length // size) * size for group in packing.groups)
        return filled * (16 * size + 10 * dim + 2.5 * dim**2 / size)

    return Chunks(packing, device, min(CHUNK_SIZES, key=work))


class _System:
    """The parts of all chunks that do not depend on states.

    With h key heads, H value heads and chunks of c tokens: query and key [chunks, h, c, key_dim]; value
    [chunks, H, c, value_dim]; beta [chunks, H, c, 1]; growth and to_end [chunks, H, c, 1]: the decay from the chunk's
    start to a token, and from there to its end; decay [chunks, H, c, c]: from a token (column) to a later one (row),
    else 0; similar [chunks, h, c, c]: products of the keys; inverse [chunks, H, c, c]: of the triangular system.
    """

    def __init__(self, row: DeltaInputs, chunks: Chunks) -> None:
        self.row, self.chunks, self.query_length = row, chunks, row.q.shape[-1] ** -0.5
        self.flat_query, self.query_factor = normalize(row.q, self.query_length)
        self.flat_key, self.key_factor = normalize(row.k)
        self.query, self.key = chunks.split(self.flat_query), chunks.split(self.flat_key)
        self.value, self.beta = chunks.split(row.v).float(), self._filled(row.beta)
        log_decay = self._filled(row.g).cumsum(2)
        self.growth, self.to_end = log_decay.exp(), (log_decay[:, :, -1:] - log_decay).exp_()
        later = torch.full((chunks.size, chunks.size), float("-inf"), device=row.v.device).triu_(1)
        self.decay = (log_decay - log_decay.mT).add_(later).exp_()
        self.similar = self.key @ self.key.mT
        self.inverse = inverse_of_unit_lower(self.scaled(self.similar, self.decay * self.beta))

    def _filled(self, x: Tensor) -> Tensor:
        """Returns x [tokens, H] in chunks, with 0 for the tokens that fill up: there nothing decays or is corrected."""
        out = self.chunks.split(x.unsqueeze(-1)).float()
        return out if self.chunks.fill is None else out.masked_fill_(self.chunks.fill, 0)

    def by_key_head(self, x: Tensor) -> Tensor:
        """Returns a view [chunks, h, H / h, ...] of x [chunks, H, ...]."""
        return x.unflatten(1, (self.key.shape[1], -1))

    def scaled(self, x: Tensor, factor: Tensor) -> Tensor:
        """Returns x [chunks, h, c, n] for each value head, times its factor, [chunks, H, c, n] or [chunks, H, c, 1]."""
        return (x.unsqueeze(2) * self.by_key_head(factor)).flatten(1, 2)

    def summed(self, x: Tensor) -> Tensor:
        """Returns the sums [chunks, h, ...] of x [chunks, H, ...] over the value heads of each key head."""
        return x if x.shape[1] == self.key.shape[1] else self.by_key_head(x).sum(2)


class _Scan(torch.autograd.Function):
    """Keeps the inputs and the states at the chunks' starts; backward computes the rest again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks
    ) -> tuple[Tensor, Tensor]:
        out, final, states = _scan(_System(DeltaInputs(q, k, v, g, beta), chunks), None)
        ctx.save_for_backward(q, k, v, g, beta, states)
        ctx.chunks = chunks
        ctx.mark_non_differentiable(final)
        return out, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *row, states = ctx.saved_tensors
        return *_Gradients(_System(DeltaInputs(*row), ctx.chunks), states, grads[0]).of_inputs(), None


def _scan(system: _System, initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output, the states after the row, and those at the start of each chunk that has a state there."""
    chunks, s = system.chunks, system
    fresh = 0 if initial is not None else chunks.steps[0].stop
    corrections = s.inverse @ (s.value * s.beta)
    states, final = _advance(s, corrections, initial, fresh)
    out = s.scaled(s.query @ s.key.mT, s.decay) @ corrections
    if fresh < len(out):
        _add_product(out[fresh:], s.scaled(s.query[fresh:], s.growth[fresh:]), states)
    return chunks.join(out).to(s.row.v.dtype), final.index_select(0, chunks.ranks), states


def _advance(s: _System, corrections: Tensor, initial: Tensor | None, fresh: int) -> tuple[Tensor, Tensor]:
    """Advances the states from chunk to chunk, and lessens the corrections by what the states hold for the keys.

    Args:
        fresh: the first so many chunks have no state at their start.
    Returns:
        the state at the start of each other chunk, and the last states, in the order of `chunks.order`.
    """
    solved_key = s.inverse[fresh:] @ s.scaled(s.key[fresh:], s.growth[fresh:] * s.beta[fresh:])
    key_to_end = s.scaled(s.key, s.to_end)
    states = solved_key.new_empty(*solved_key.shape[:2], s.key.shape[3], s.value.shape[3])
    state = None if initial is None else initial.float().index_select(0, s.chunks.order)
    for step in s.chunks.steps:
        if state is None:
            state = key_to_end[step].mT @ corrections[step]
            continue
        earlier, current = slice(step.start - fresh, step.stop - fresh), state[: step.stop - step.start]
        states[earlier] = current
        _add_product(corrections[step], solved_key[earlier], current, -1)
        _add_product(current.mul_(s.growth[step][:, :, -1:]), key_to_end[step].mT, corrections[step])
    assert state is not None
    return states, state


def _add_product(out: Tensor, a: Tensor, b: Tensor, sign: int = 1) -> None:
    """Adds sign * a @ b to out; each has two dimensions of a batch."""
    out.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1), alpha=sign)


class _Gradients:
    """Computes the gradients of the inputs, given that of the output of `_scan` and the states that it returned.

    products: of queries and keys, [chunks, h, c, c]. missing: the part of the values that the states do not hold yet,
    [chunks, H, c, value_dim]. decayed_query, decayed_key: what reads the states, for the chunks that have one.
    """

    def __init__(self, system: _System, states: Tensor, grad: Tensor) -> None:
        s, self._fresh = system, system.chunks.steps[0].stop
        self._system, self._states, self._later = s, states, slice(self._fresh, None)
        grad = s.chunks.split(grad).float()
        self._grad = grad if s.chunks.fill is None else grad.masked_fill_(s.chunks.fill, 0)
        self._products, self._missing = s.query @ s.key.mT, s.value
        if len(states):
            self._decayed_query = s.scaled(s.query[self._later], s.growth[self._later])
            self._decayed_key = s.scaled(s.key[self._later], s.growth[self._later])
            _add_product(self._missing[self._later], self._decayed_key, states, -1)
        self._corrections = s.inverse @ (self._missing * s.beta)

    def of_inputs(self) -> tuple[Tensor, ...]:
        s = self._system
        of_corrections = s.scaled(self._products, s.decay).mT @ self._grad
        end = self._go_back(of_corrections) if len(self._states) else None
        of_solved = s.inverse.mT @ of_corrections
        of_query, of_key, of_beta, of_log = self._of_pairs(of_solved)
        of_beta.add_(torch.linalg.vecdot(of_solved, self._missing))
        of_value = of_solved.mul_(s.beta)
        if end is not None:
            self._add_of_readers(of_value, of_query, of_key, of_log)
            self._add_of_end(*end, of_key, of_log)
        return self._of_tokens(of_query, of_key, of_value, of_log, of_beta)

    def _go_back(self, of_corrections: Tensor) -> tuple[Tensor, Tensor]:
        """Goes back from state to state, and adds to the gradient of the corrections what they do to later states.

        Returns:
            the gradient of the keys decayed to the end of their chunk, [chunks, H, c, key_dim], and that of the
            logarithm of all decay until there, [chunks, H].
        """
        s, fresh, states = self._system, self._fresh, self._states
        solved_key = s.inverse[self._later] @ (self._decayed_key * s.beta[self._later])
        key_to_end = s.scaled(s.key, s.to_end)
        of_key_to_end, of_end = torch.zeros_like(key_to_end), torch.zeros_like(s.beta[:, :, 0, 0])
        of_state = states.new_zeros(fresh, *states.shape[1:])
        for before, step in reversed(list(pairwise(s.chunks.steps))):
            count, later = step.stop - step.start, slice(step.start - fresh, step.stop - fresh)
            here, of_next = slice(before.start, before.start + count), of_state[:count]
            # of_next is the gradient of the state at the end of `step`; from here on, at its start.
            of_next.mul_(s.growth[step][:, :, -1:])
            _add_product(of_next, self._decayed_query[later].mT, self._grad[step])
            _add_product(of_next, solved_key[later].mT, of_corrections[step], -1)
            _add_product(of_corrections[here], key_to_end[here], of_next)
            _add_product(of_key_to_end[here], self._corrections[here], of_next.mT)
            of_end[here] = torch.linalg.vecdot(states[later].flatten(2), of_next.flatten(2))
        return of_key_to_end, of_end

    def _of_pairs(self, of_solved: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key, beta [chunks, H, c] and log decay [chunks, H, c] by pairs of tokens.

        Args:
            of_solved: the gradient of beta times the missing values.
        """
        s = self._system
        of_products = (self._grad @ self._corrections.mT).mul_(s.decay)
        # Minus the gradient of the similarities times beta.
        of_similar = (of_solved @ self._corrections.mT).mul_(s.decay)
        of_similar.diagonal(dim1=-2, dim2=-1).zero_()
        of_decay = s.scaled(s.similar, of_similar)
        of_beta = of_decay.sum(-1).neg_()
        s.by_key_head(of_decay.mul_(-s.beta)).addcmul_(s.by_key_head(of_products), self._products.unsqueeze(2))
        of_log = of_decay.sum(-1).sub_(of_decay.sum(-2))
        of_products, of_similar = s.summed(of_products), s.summed(of_similar.mul_(-s.beta))
        of_key = (of_similar + of_similar.mT) @ s.key
        _add_product(of_key, of_products.mT, s.query)
        return of_products @ s.key, of_key, of_beta, of_log

    def _add_of_readers(self, of_value: Tensor, of_query: Tensor, of_key: Tensor, of_log: Tensor) -> None:
        """Adds the gradients by what queries and keys read from states."""
        s, later, growth = self._system, self._later, self._system.growth[self._later]
        of_decayed = self._grad[later] @ self._states.mT
        of_log[later] += torch.linalg.vecdot(of_decayed, self._decayed_query)
        of_query[later] += s.summed(of_decayed.mul_(growth))
        of_decayed = of_value[later] @ self._states.mT
        of_log[later] -= torch.linalg.vecdot(of_decayed, self._decayed_key)
        of_key[later] -= s.summed(of_decayed.mul_(growth))

    def _add_of_end(self, of_key_to_end: Tensor, of_end: Tensor, of_key: Tensor, of_log: Tensor) -> None:
        """Adds the gradients by what keys write to the states at the ends of chunks."""
        s = self._system
        of_key_to_end.mul_(s.to_end)
        of_log -= (s.by_key_head(of_key_to_end) * s.key.unsqueeze(2)).sum(-1).flatten(1, 2)
        of_log[:, :, -1] += of_end
        of_key += s.summed(of_key_to_end)

    def _of_tokens(
        self, of_query: Tensor, of_key: Tensor, of_value: Tensor, of_log: Tensor, of_beta: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of the inputs, in their shapes and dtypes."""
        s, row, join = self._system, self._system.row, self._system.chunks.join
        of_g = of_log.flip(-1).cumsum(-1).flip(-1)
        return (
            _length_gradient(join(of_query), s.flat_query, s.query_factor, s.query_length).to(row.q.dtype),
            _length_gradient(join(of_key), s.flat_key, s.key_factor).to(row.k.dtype),
            join(of_value).to(row.v.dtype),
            join(of_g.unsqueeze(-1)).squeeze(-1).to(row.g.dtype),
            join(of_beta.unsqueeze(-1)).squeeze(-1).to(row.beta.dtype),
        )


def inverse_of_unit_lower(x: Tensor) -> Tensor:
    """Returns the inverse of 1 plus the part of x [..., size, size] that is below the diagonal, by matrix products.

    These use all cores, while torch solves one by one.

    Blocks on the diagonal are inverted by forward substitution. Then pairs of them are joined: the inverse of
    [[a, 0], [b, c]] is [[1/a, 0], [-1/c b 1/a, 1/c]], which is as exact as forward substitution.

    Args:
        x: size is 8 times a power of two.
    """
    size, flat = x.shape[-1], x.flatten(0, -3)
    out = torch.zeros_like(flat)
    _diagonal_blocks(out, _BLOCK).copy_(_small_inverses(_diagonal_blocks(flat, _BLOCK)))
    block = _BLOCK
    while block < size:
        pairs, between = _diagonal_blocks(out, 2 * block), _diagonal_blocks(flat, 2 * block)[..., block:, :block]
        first, second = pairs[..., :block, :block], pairs[..., block:, block:]
        pairs[..., block:, :block] = (second @ between @ first).neg_()
        block *= 2
    return out.view(x.shape)


def _small_inverses(x: Tensor) -> Tensor:
    out = x.tril(-1).neg_()
    for row in range(2, x.shape[-1]):
        out[..., row : row + 1, :row] += out[..., row : row + 1, :row] @ out[..., :row, :row]
    out.diagonal(dim1=-2, dim2=-1).fill_(1)
    return out


def _diagonal_blocks(x: Tensor, block: int) -> Tensor:
    """Returns a view [n, size / block, block, block] of x [n, size, size], which is contiguous."""
    n, size, _ = x.shape
    return x.as_strided((n, size // block, block, block), (size * size, block * (size + 1), size, 1))

"""Block attention: each token of a block sees the whole block and the context before the block's anchor.

The context at the anchor itself is left out, because while drafting the target has not processed the anchor yet.
Chen et al., DFlash (2026), https://arxiv.org/abs/2602.06036.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...shapes.parts.windows import MAX_SCORES
from .blocks import Blocks, Span


class KeyValues(NamedTuple):
    """Keys and values, [tokens, kv_heads, head_dim] each."""

    key: Tensor
    value: Tensor


def attend_blocks(query: Tensor, context: KeyValues, own: KeyValues, blocks: Blocks, scaling: float) -> Tensor:
    """Returns the output of block attention, in the shape of the query.

    Args:
        query: [m * size, heads, head_dim].
        context: keys and values of n packed tokens.
        own: keys and values of the blocks' tokens.
    """
    return _BlockAttention.apply(blocks, scaling, query, *context, *own)  # pyright: ignore[reportReturnType]


class _BlockAttention(torch.autograd.Function):
    """Computes scores for a few blocks at a time, so that memory grows with blocks and tokens and not with their
    product."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, scaling: float, query: Tensor, *keys_values: Tensor) -> Tensor:
        kv_heads = keys_values[0].shape[1]
        out = _by_block(torch.zeros_like(query), kv_heads, blocks.size)
        log_sums = out.new_zeros(out.shape[:-1])
        for span in _block_groups(blocks, query.shape[1]):
            part = _BlockGroup(span, blocks, scaling, query, keys_values)
            context, own = part.context_scores(), part.own_scores()
            sums = torch.logaddexp(context.logsumexp(-1), own.logsumexp(-1))
            log_sums[:, span.blocks] = sums
            of_context, of_own = (scores.sub_(sums.unsqueeze(-1)).exp_() for scores in (context, own))
            out[:, span.blocks] = _flat_product(of_context, part.context.value) + of_own @ part.own.value
        result = _by_token(out, blocks.size).to(query.dtype)
        ctx.save_for_backward(result, log_sums, query, *keys_values)
        ctx.blocks, ctx.scaling = blocks, scaling
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, log_sums, query, *keys_values = ctx.saved_tensors
        (grad,), blocks = grads, ctx.blocks
        dtype, kv_heads = log_sums.dtype, keys_values[0].shape[1]
        along = torch.linalg.vecdot(grad.to(dtype), out.to(dtype)).unsqueeze(-1)
        along = _by_block(along, kv_heads, blocks.size)
        of_query = _by_block(torch.zeros_like(query), kv_heads, blocks.size)
        of_context = [torch.zeros_like(each, dtype=dtype) for each in keys_values[:2]]
        of_own = [_by_block(torch.zeros_like(each), kv_heads, blocks.size) for each in keys_values[2:]]
        for span in _block_groups(blocks, query.shape[1]):
            part = _BlockGroup(span, blocks, ctx.scaling, query, keys_values)
            of_out, sums = part.of_blocks(grad), log_sums[:, span.blocks].unsqueeze(-1)
            weights = part.context_scores().sub_(sums).exp_()
            of_context[1][span.context] += _flat_sum(weights, of_out)
            of_scores = _flat_product(of_out, part.context.value.mT).sub_(along[:, span.blocks]).mul_(weights)
            of_context[0][span.context] += _flat_sum(of_scores, part.query)
            of_query[:, span.blocks] = _flat_product(of_scores, part.context.key)
            weights = part.own_scores().sub_(sums).exp_()
            of_own[1][:, span.blocks] = weights.mT @ of_out
            of_scores = (of_out @ part.own.value.mT).sub_(along[:, span.blocks]).mul_(weights)
            of_own[0][:, span.blocks] = of_scores.mT @ part.query
            of_query[:, span.blocks] += of_scores @ part.own.key
        of_query *= ctx.scaling
        gradients = [_by_token(of_query, blocks.size), *of_context, *(_by_token(each, blocks.size) for each in of_own)]
        return None, None, *(each.to(query.dtype) for each in gradients)


class _BlockGroup:
    """Some blocks of one sequence, c of them, in at least float32.

    query: [kv_heads, c, queries, head_dim], scaled; `queries` are those of a block that share a key.
    context: [kv_heads, seen, head_dim]. own: [kv_heads, c, size, head_dim].
    """

    def __init__(
        self, span: Span, blocks: Blocks, scaling: float, query: Tensor, keys_values: Sequence[Tensor]
    ) -> None:
        self._span, self._blocks = span, blocks
        self._kv_heads = keys_values[0].shape[1]
        self.query = self.of_blocks(query) * scaling
        self.context = KeyValues(*(_upcast(each[span.context]).transpose(0, 1) for each in keys_values[:2]))
        self.own = KeyValues(*(self.of_blocks(each) for each in keys_values[2:]))

    def of_blocks(self, x: Tensor) -> Tensor:
        """Returns the part of x, [m * size, heads, head_dim] -> [kv_heads, c, queries, head_dim]."""
        size, rows = self._blocks.size, self._span.blocks
        return _by_block(x[rows.start * size : rows.stop * size], self._kv_heads, size)

    def context_scores(self) -> Tensor:
        """Returns [kv_heads, c, queries, seen], -inf where masked. No block masks the tokens before the first
        anchor."""
        context, anchors = self._span.context, self._blocks.anchors[self._span.blocks, None]
        first = self._blocks.host_anchors[self._span.blocks.start]
        scores = _flat_product(self.query, self.context.key.mT)
        hidden = torch.arange(first, context.stop, device=anchors.device) >= anchors
        scores[..., first - context.start :].masked_fill_(hidden[:, None, :], float("-inf"))
        return scores

    def own_scores(self) -> Tensor:
        """Returns [kv_heads, c, queries, size]."""
        return self.query @ self.own.key.mT


def _block_groups(blocks: Blocks, heads: int) -> Iterator[Span]:
    """Yields spans of each sequence's blocks whose scores number at most MAX_SCORES, or single blocks."""
    for span in blocks.spans:
        num_seen = span.context.stop - span.context.start + blocks.size
        step = max(1, MAX_SCORES // (heads * blocks.size * num_seen))
        for start in range(span.blocks.start, span.blocks.stop, step):
            stop = min(start + step, span.blocks.stop)
            yield Span(slice(start, stop), slice(span.context.start, blocks.host_anchors[stop - 1]))


def _by_block(x: Tensor, kv_heads: int, size: int) -> Tensor:
    """Groups by block, [m * size, heads, head_dim] -> [kv_heads, m, queries, head_dim], in at least float32."""
    parts = _upcast(x).unflatten(0, (-1, size)).unflatten(2, (kv_heads, -1))
    return parts.permute(2, 0, 1, 3, 4).flatten(2, 3)


def _by_token(x: Tensor, size: int) -> Tensor:
    return x.unflatten(2, (size, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1)


def _flat_product(x: Tensor, y: Tensor) -> Tensor:
    """Multiplies [kv_heads, c, queries, p] by [kv_heads, p, q], the same for all blocks -> [kv_heads, c, queries,
    q]."""
    return (x.flatten(1, 2) @ y).unflatten(1, x.shape[1:3])


def _flat_sum(x: Tensor, y: Tensor) -> Tensor:
    """Multiplies and sums over all queries, [kv_heads, c, queries, p] and [kv_heads, c, queries, q] -> [p, kv_heads,
    q]."""
    return (x.flatten(1, 2).mT @ y.flatten(1, 2)).transpose(0, 1)


def _upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))

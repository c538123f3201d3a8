"""Attention of an unrolled draft: in step i, the query of a token sees the keys of step 0 up to its own token, and its
own keys of steps 1 to i.

This is what a draft sees when it drafts from that token on its own: the target's features are known up to there.
Li et al., EAGLE-3 (2025), https://arxiv.org/abs/2503.01840, section 3.2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.attention import AttentionKind, Packing
from ...ops.partial_attention import AttentionGradients, PartialAttention, attend_part, part_gradients
from .sequence_shard import SequenceShard


def attend_unrolled(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    packing: Packing,
    kind: AttentionKind,
    shard: SequenceShard,
) -> Tensor:
    """Returns the output of attention in the last step, in the shape of the query.

    Args:
        query: [tokens, heads, head_dim].
        keys, values: of each step so far, [tokens, kv_heads, head_dim].
        packing: of all tokens.
        shard: this rank's tokens; where ranks share them, keys and values of the first step are `by_heads`.
    """
    return _UnrolledAttention.apply(packing, kind, shard, query, *keys, *values)  # pyright: ignore[reportReturnType]


class _UnrolledAttention(torch.autograd.Function):
    """Keeps nothing of size tokens x tokens: see partial_attention.py."""

    @staticmethod
    def forward(
        ctx: Any, packing: Packing, kind: AttentionKind, shard: SequenceShard, query: Tensor, *tensors: Tensor
    ) -> Tensor:
        keys, values = _halves(tensors)
        first = _attend_first(query, keys[0], values[0], packing, kind, shard)
        own = _own_scores(query, keys[1:], kind)
        log_sums = torch.cat([first.log_sum_exps.unsqueeze(-1).to(own.dtype), own], dim=-1).logsumexp(-1)
        out = first.out.to(own.dtype) * (first.log_sum_exps - log_sums).exp().unsqueeze(-1)
        for weights, value in zip((own - log_sums.unsqueeze(-1)).exp().unbind(-1), values[1:], strict=True):
            out += weights.unsqueeze(-1) * _by_query(value, query)
        out = out.to(query.dtype)
        ctx.save_for_backward(out, log_sums, query, *tensors)
        ctx.packing, ctx.kind, ctx.shard = packing, kind, shard
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, log_sums, query, *tensors = ctx.saved_tensors
        keys, values = _halves(tensors)
        (grad,) = grads
        grad = grad.contiguous()
        whole = PartialAttention(out, log_sums)
        of_query, *of_first = _first_gradients(grad, query, keys[0], values[0], whole, ctx.packing, ctx.kind, ctx.shard)
        along = (grad * out).sum(-1, dtype=log_sums.dtype)
        weights = (_own_scores(query, keys[1:], ctx.kind) - log_sums.unsqueeze(-1)).exp()
        of_query = of_query.to(log_sums.dtype)
        of_keys, of_values = [of_first[0]], [of_first[1]]
        for weight, key, value in zip(weights.unbind(-1), keys[1:], values[1:], strict=True):
            of_weight = (grad * _by_query(value, query)).sum(-1, dtype=log_sums.dtype)
            of_score = (weight * (of_weight - along) * ctx.kind.scaling).unsqueeze(-1)
            of_query += of_score * _by_query(key, query)
            of_keys.append(_by_key(of_score * query, key))
            of_values.append(_by_key(weight.unsqueeze(-1) * grad, value))
        return None, None, None, of_query.to(query.dtype), *of_keys, *of_values


def _attend_first(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, kind: AttentionKind, shard: SequenceShard
) -> PartialAttention:
    """Attends to the keys of step 0, which are split by heads over the ranks."""
    attended = attend_part(shard.by_heads(query), key, value, packing, kind)
    return PartialAttention(
        shard.by_tokens(attended.out), shard.by_tokens(attended.log_sum_exps.unsqueeze(-1)).squeeze(-1)
    )


def _first_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: PartialAttention,
    packing: Packing,
    kind: AttentionKind,
    shard: SequenceShard,
) -> AttentionGradients:
    grad, query, out = (shard.by_heads(each) for each in (grad, query, whole.out))
    log_sums = shard.by_heads(whole.log_sum_exps.unsqueeze(-1)).squeeze(-1)
    found = part_gradients(grad, query, key, value, PartialAttention(out, log_sums), packing, kind)
    return found._replace(query=shard.by_tokens(found.query))


def _halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    middle = len(tensors) // 2
    return tensors[:middle], tensors[middle:]


def _own_scores(query: Tensor, keys: Sequence[Tensor], kind: AttentionKind) -> Tensor:
    """Returns [tokens, heads, steps], in at least float32."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    if not keys:
        return query.new_empty((*query.shape[:2], 0), dtype=dtype)
    scores = [torch.linalg.vecdot(query.to(dtype), _by_query(key, query).to(dtype)) for key in keys]
    return torch.stack(scores, dim=-1) * kind.scaling


def _by_query(x: Tensor, query: Tensor) -> Tensor:
    """Repeats [tokens, kv_heads, head_dim] to [tokens, heads, head_dim]."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _by_key(x: Tensor, key: Tensor) -> Tensor:
    """Sums [tokens, heads, head_dim] over the queries of each key."""
    return x.unflatten(1, (key.shape[1], -1)).sum(2).to(key.dtype)

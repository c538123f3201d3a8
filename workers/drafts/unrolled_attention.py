"""Attention of an unrolled draft: in step i of the unrolling, the query of a token sees the keys of step 0 up to its
own, and its own ones of the steps 1 to i.

That is what a draft sees that goes on from that token by itself: the target's features are known up to there.
Li et al., EAGLE-3 (2025), https://arxiv.org/abs/2503.01840, section 3.2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..attention import AttentionKind, Packing
from ..attention_parts import Attended, attend_part, part_gradients


def attend_unrolled(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], packing: Packing, kind: AttentionKind
) -> Tensor:
    """query [tokens, heads, head_dim]; keys and values of each step so far, [tokens, kv_heads, head_dim]. Returns the
    shape of the query."""
    return _Unrolled.apply(packing, kind, query, *keys, *values)  # pyright: ignore[reportReturnType]


class _Unrolled(torch.autograd.Function):
    """Nothing of the size of tokens x tokens is kept: see attention_parts."""

    @staticmethod
    def forward(ctx: Any, packing: Packing, kind: AttentionKind, query: Tensor, *tensors: Tensor) -> Tensor:
        keys, values = _halves(tensors)
        first = attend_part(query, keys[0], values[0], packing, kind)
        own = _own_scores(query, keys[1:], kind)
        log_sums = torch.cat([first.log_sums.unsqueeze(-1).to(own.dtype), own], dim=-1).logsumexp(-1)
        out = first.out.to(own.dtype) * (first.log_sums - log_sums).exp().unsqueeze(-1)
        for weights, value in zip((own - log_sums.unsqueeze(-1)).exp().unbind(-1), values[1:], strict=True):
            out += weights.unsqueeze(-1) * _by_query(value, query)
        out = out.to(query.dtype)
        ctx.save_for_backward(out, log_sums, query, *tensors)
        ctx.packing, ctx.kind = packing, kind
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, log_sums, query, *tensors = ctx.saved_tensors
        keys, values = _halves(tensors)
        (grad,) = grads
        grad = grad.contiguous()
        whole = Attended(out, log_sums)
        of_query, *of_first = part_gradients(grad, query, keys[0], values[0], whole, ctx.packing, ctx.kind)
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
        return None, None, of_query.to(query.dtype), *of_keys, *of_values


def _halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    middle = len(tensors) // 2
    return tensors[:middle], tensors[middle:]


def _own_scores(query: Tensor, keys: Sequence[Tensor], kind: AttentionKind) -> Tensor:
    """[tokens, heads, steps], float32 at least."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    if not keys:
        return query.new_empty((*query.shape[:2], 0), dtype=dtype)
    scores = [torch.linalg.vecdot(query.to(dtype), _by_query(key, query).to(dtype)) for key in keys]
    return torch.stack(scores, dim=-1) * kind.scaling


def _by_query(x: Tensor, query: Tensor) -> Tensor:
    """[tokens, kv_heads, head_dim] -> [tokens, heads, head_dim]."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _by_key(x: Tensor, key: Tensor) -> Tensor:
    """[tokens, heads, head_dim] -> summed over the queries of each key."""
    return x.unflatten(1, (key.shape[1], -1)).sum(2).to(key.dtype)

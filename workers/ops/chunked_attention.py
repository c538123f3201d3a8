"""Plain attention in chunks of queries, where flash attention does not apply. The sinks are left to the caller."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..shapes.parts.windows import queries_of_scores
from .attention_kind import AttentionKind
from .linear import soft_cap_derivatives, soft_capped


def attend_in_chunks(query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> tuple[Tensor, Tensor]:
    """Attends sequences of one length.

    Args:
        query: [count, heads, length, head_dim], of the last `length` tokens.
        key: [count, kv_heads, tokens, head_dim], like `value`.
    Returns:
        the output, and the log-sum-exp of the scores, float32 [count, heads, length].
    """
    out, sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
    for rows, seen in _chunks(query, key, kind):
        scores = _scores(query, key, rows, seen, kind)
        sums[:, :, rows] = scores.logsumexp(-1).flatten(1, 2)
        weights = scores.softmax(-1)
        out[:, :, rows] = (weights @ value[:, :, None, seen].float()).flatten(1, 2).to(out.dtype)
    return out, sums


def gradients_in_chunks(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, kind: AttentionKind
) -> tuple[Tensor, ...]:
    """Returns the gradients of query, key and value, given the output and the log-sum-exp."""
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
    along = torch.linalg.vecdot(grad.float(), out.float())
    kv_heads = key.shape[1]
    for rows, seen in _chunks(query, key, kind):
        scores = _scores(query, key, rows, seen, kind)
        # Hidden keys have the score -inf.
        slopes = None if kind.cap is None else soft_cap_derivatives(scores, kind.cap).clamp_(min=0)
        weights = scores.sub_(_grouped(sums, kv_heads)[..., rows, None]).exp_()
        of_out = _grouped(grad, kv_heads)[..., rows, :].float()
        of_value[:, :, seen] += (weights.mT @ of_out).sum(2)
        of_scores = (of_out @ value[:, :, None, seen].float().mT).sub_(_grouped(along, kv_heads)[..., rows, None])
        of_scores.mul_(weights).mul_(kind.scaling)
        if slopes is not None:
            of_scores.mul_(slopes)
        of_query[:, :, rows] = (of_scores @ key[:, :, None, seen].float()).flatten(1, 2).to(query.dtype)
        of_key[:, :, seen] += (of_scores.mT @ _grouped(query, kv_heads)[..., rows, :].float()).sum(2)
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype)


def _chunks(query: Tensor, key: Tensor, kind: AttentionKind) -> Iterator[tuple[slice, slice]]:
    """Yields chunks of queries, and the keys that any query of the chunk sees."""
    (count, heads, length, _), num_keys = query.shape, key.shape[2]
    window, before = min(kind.window or num_keys, num_keys), num_keys - length
    step = queries_of_scores(count * heads, length, window)
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield slice(start, stop), slice(max(0, before + start - window + 1), before + stop)


def _scores(query: Tensor, key: Tensor, rows: slice, seen: slice, kind: AttentionKind) -> Tensor:
    """Returns the scores, float32 [count, kv_heads, queries of each, rows, seen]; hidden keys have -inf."""
    queries = _grouped(query, key.shape[1])[..., rows, :].float()
    scores = queries @ key[:, :, None, seen].float().mT
    at, of = (torch.arange(each.start, each.stop, device=query.device) for each in (rows, seen))
    distance = at[:, None] + (key.shape[2] - query.shape[2]) - of[None, :]
    hidden = distance < 0
    if kind.window:
        hidden |= distance >= kind.window
    return soft_capped(scores.mul_(kind.scaling), kind.cap).masked_fill_(hidden, float("-inf"))


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Reshapes [count, heads, ...] to [count, kv_heads, queries of each, ...]."""
    return x.unflatten(1, (kv_heads, -1))

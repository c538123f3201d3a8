"""Attention over some of a query's keys, with the log-sum-exp of their scores.

By it the results over several parts are combined to the result over all keys, and the gradients of a part are computed
from the log-sum-exp over all keys.

Milakov and Gimelshein, Online normalizer calculation for softmax (2018), https://arxiv.org/abs/1805.02867; Dao,
FlashAttention-2 (2023), section 3.1, https://arxiv.org/abs/2307.08691.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..shapes.windows import MAX_SCORES
from .attention import (
    AttentionKind,
    Packing,
    fits_flash_on_gpu,
    flash_gradients_on_cpu,
    flash_gradients_on_gpu,
    flash_on_cpu,
    flash_on_gpu,
    join_groups,
    rows_by_group,
)


class PartialAttention(NamedTuple):
    """An attention output and the log-sum-exp of its scores.

    out: [tokens, heads, head_dim]. log_sum_exps: float32 [tokens, heads].
    """

    out: Tensor
    log_sum_exps: Tensor


class AttentionGradients(NamedTuple):
    """Gradients of query, key and value, of their shapes."""

    query: Tensor
    key: Tensor
    value: Tensor


def attend_part(query: Tensor, key: Tensor, value: Tensor, packing: Packing, kind: AttentionKind) -> PartialAttention:
    """Computes the function `attend` over these keys, without gradients."""
    if fits_flash_on_gpu(query):
        out, log_sums = flash_on_gpu(query, key, value, packing, kind)
        return PartialAttention(out, log_sums.t())
    of_group = flash_on_cpu if _fits_cpu(query) else _chunked
    parts = []
    for group in packing.groups:
        q, k, v = (rows_by_group(x, group) for x in (query, key, value))
        parts.append(of_group(q, k, v, kind))
    outs, sums = ([part[i] for part in parts] for i in (0, 1))
    return PartialAttention(join_groups(outs), join_groups([each.unsqueeze(-1) for each in sums]).squeeze(-1))


def part_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: PartialAttention,
    packing: Packing,
    kind: AttentionKind,
) -> AttentionGradients:
    """Returns the gradients of query, and of these keys and values.

    Args:
        grad: gradient of the output over all keys.
        whole: the output over all keys.
    """
    if fits_flash_on_gpu(query):
        out, log_sums = whole.out.contiguous(), whole.log_sum_exps.t().contiguous()
        return AttentionGradients(*flash_gradients_on_gpu(grad, query, key, value, out, log_sums, packing, kind))
    of_group = flash_gradients_on_cpu if _fits_cpu(query) else _chunked_gradients
    parts = []
    for group in packing.groups:
        g, q, k, v, out = (rows_by_group(x, group) for x in (grad, query, key, value, whole.out))
        sums = rows_by_group(whole.log_sum_exps.unsqueeze(-1), group).squeeze(-1)
        parts.append(of_group(g, q, k, v, out, sums, kind))
    return AttentionGradients(*(join_groups(list(of_groups)) for of_groups in zip(*parts, strict=True)))


def _fits_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu"


# Plain attention in chunks of queries, where flash attention on CUDA does not apply.


def _chunked(query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> PartialAttention:
    out, sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
    for rows, seen in _chunks(query, kind):
        scores = _scores(query, key, rows, seen, kind)
        sums[:, :, rows] = scores.logsumexp(-1).flatten(1, 2)
        weights = scores.softmax(-1)
        out[:, :, rows] = (weights @ value[:, :, None, seen].float()).flatten(1, 2).to(out.dtype)
    return PartialAttention(out, sums)


def _chunked_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, kind: AttentionKind
) -> tuple[Tensor, ...]:
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
    along = torch.linalg.vecdot(grad.float(), out.float())
    kv_heads = key.shape[1]
    for rows, seen in _chunks(query, kind):
        weights = _scores(query, key, rows, seen, kind).sub_(_grouped(sums, kv_heads)[..., rows, None]).exp_()
        of_out = _grouped(grad, kv_heads)[..., rows, :].float()
        of_value[:, :, seen] += (weights.mT @ of_out).sum(2)
        of_scores = (of_out @ value[:, :, None, seen].float().mT).sub_(_grouped(along, kv_heads)[..., rows, None])
        of_scores.mul_(weights).mul_(kind.scaling)
        of_query[:, :, rows] = (of_scores @ key[:, :, None, seen].float()).flatten(1, 2).to(query.dtype)
        of_key[:, :, seen] += (of_scores.mT @ _grouped(query, kv_heads)[..., rows, :].float()).sum(2)
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype)


def _chunks(query: Tensor, kind: AttentionKind) -> Iterator[tuple[slice, slice]]:
    """Yields chunks of queries, and the keys that any query of the chunk sees."""
    count, heads, length, _ = query.shape
    window = min(kind.window or length, length)
    # n queries have n * (n + window) scores; n bounds them, over all sequences and heads.
    most = MAX_SCORES // (count * heads)
    step = max(16, min(window, most // (2 * window), length))
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield slice(start, stop), slice(max(0, start - window + 1), stop)


def _scores(query: Tensor, key: Tensor, rows: slice, seen: slice, kind: AttentionKind) -> Tensor:
    """Returns the scores, float32 [count, kv_heads, queries of each, rows, seen]; hidden keys have -inf."""
    queries = _grouped(query, key.shape[1])[..., rows, :].float()
    scores = queries @ key[:, :, None, seen].float().mT
    at, of = (torch.arange(each.start, each.stop, device=query.device) for each in (rows, seen))
    distance = at[:, None] - of[None, :]
    hidden = distance < 0
    if kind.window:
        hidden |= distance >= kind.window
    return scores.mul_(kind.scaling).masked_fill_(hidden, float("-inf"))


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Reshapes [count, heads, ...] to [count, kv_heads, queries of each, ...]."""
    return x.unflatten(1, (kv_heads, -1))

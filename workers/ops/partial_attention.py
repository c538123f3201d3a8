"""Attention over some of a query's keys, with the log-sum-exp of their scores.

By it the results over several parts are combined to the result over all keys, and the gradients of a part are computed
from the log-sum-exp over all keys.

Milakov and Gimelshein, Online normalizer calculation for softmax (2018), https://arxiv.org/abs/1805.02867; Dao,
FlashAttention-2 (2023), section 3.1, https://arxiv.org/abs/2307.08691.
"""

from typing import NamedTuple

from torch import Tensor

from .attention import (
    AttentionKind,
    Packing,
    attend_group,
    fits_flash_on_gpu,
    flash_gradients_on_gpu,
    flash_on_gpu,
    group_gradients,
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
    if fits_flash_on_gpu(query, kind):
        out, log_sums = flash_on_gpu(query, key, value, packing, kind)
        return PartialAttention(out, log_sums.t())
    parts = []
    for group in packing.groups:
        q, k, v = (rows_by_group(x, group) for x in (query, key, value))
        parts.append(attend_group(q, k, v, kind))
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
    if fits_flash_on_gpu(query, kind):
        out, log_sums = whole.out.contiguous(), whole.log_sum_exps.t().contiguous()
        return AttentionGradients(*flash_gradients_on_gpu(grad, query, key, value, out, log_sums, packing, kind))
    parts = []
    for group in packing.groups:
        g, q, k, v, out = (rows_by_group(x, group) for x in (grad, query, key, value, whole.out))
        sums = rows_by_group(whole.log_sum_exps.unsqueeze(-1), group).squeeze(-1)
        parts.append(group_gradients(g, q, k, v, out, sums, kind))
    return AttentionGradients(*(join_groups(list(of_groups)) for of_groups in zip(*parts, strict=True)))

"""Attention in blocks of queries, where flash attention does not apply: plain attention with windows and caps, whose
sinks are left to the caller; and attention to the tokens that an indexer has chosen (see token_index.py).

In a packed row a mask hides the tokens that are not chosen, so that keys and values are read in place, and memory grows
with the length of a sequence, not with its square. In a cache each query has copies of the latent vectors that it sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..shapes.parts.windows import queries_of_choice, queries_of_copies, queries_of_scores
from .attention_kind import AttentionKind
from .linear import soft_cap_derivatives, soft_capped

if TYPE_CHECKING:
    from .attention import Packing


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


def attend_to_chosen(query: Tensor, key: Tensor, value: Tensor, packing: "Packing", kind: AttentionKind) -> Tensor:
    """Computes `attention.attend` for a kind with chosen tokens. Gradients pass through these alone."""
    if torch.is_grad_enabled():
        return _AttendToChosen.apply(query, key, value, packing, kind)  # pyright: ignore[reportReturnType]
    return _in_blocks(query, key, value, packing, kind)


def attend_to_copies(query: Tensor, cached: Tensor, slots: Tensor, positions: Tensor, kind: AttentionKind) -> Tensor:
    """Returns the attention output of n tokens in the cache, of the query's shape, without gradients.

    Args:
        query: [n, heads, head_dim].
        cached: keys of all heads by slot, which are their values too, [slots, tokens, head_dim].
        slots: of the tokens' sequences, int64 [n]. positions: of the tokens, int64 [n].
        kind: its `chosen` are of these tokens.
    """
    assert kind.chosen is not None
    out, step = torch.empty_like(query), queries_of_copies(kind.chosen.shape[1] * cached.shape[-1])
    for start in range(0, len(query), step):
        rows = slice(start, start + step)
        chosen, own = kind.chosen[rows], slots[rows, None]
        seen = cached[own, chosen].unsqueeze(1)
        mask = query.new_zeros(chosen.shape).masked_fill_(chosen > positions[rows, None], float("-inf"))
        # The heads are queries of one head.
        attended = scaled_dot_product_attention(
            query[rows, None], seen, seen, attn_mask=mask[:, None, None], scale=kind.scaling
        )
        out[rows] = attended[:, 0]
    return out


@dataclass(frozen=True)
class _Block:
    """Consecutive queries of a sequence, and its keys up to the last of them, in a packed row.

    sees_all: whether the indexer leaves nothing out; else no chosen token is after its query.
    """

    queries: slice
    keys: slice
    sees_all: bool

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Returns the output [queries, heads, head_dim] for queries and keys of the block."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        mask = None if self.sees_all else self._mask(query, kind)
        gqa = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=kind.scaling, enable_gqa=gqa
        )
        return out[0].transpose(0, 1)

    def _mask(self, query: Tensor, kind: AttentionKind) -> Tensor:
        """Returns the mask [queries, keys], which is added to the scores."""
        assert kind.chosen is not None
        chosen = kind.chosen[self.queries].long()
        hidden = query.new_full((len(chosen), self.keys.stop - self.keys.start), float("-inf"))
        return hidden.scatter_(1, chosen, 0.0)


def _blocks(packing: "Packing", heads: int, kind: AttentionKind) -> Iterator[_Block]:
    assert kind.chosen is not None
    most, start = kind.chosen.shape[1], 0
    for length in packing.lengths:
        stop = start + min(length, most)
        yield _Block(slice(start, stop), slice(start, stop), sees_all=True)
        for first in range(stop, start + length, step := queries_of_choice(heads, length)):
            stop = min(first + step, start + length)
            yield _Block(slice(first, stop), slice(start, stop), sees_all=False)
        start += length


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, packing: "Packing", kind: AttentionKind) -> Tensor:
    out = torch.empty_like(query)
    for block in _blocks(packing, query.shape[1], kind):
        out[block.queries] = block.attend(query[block.queries], key[block.keys], value[block.keys], kind)
    return out


class _AttendToChosen(torch.autograd.Function):
    """Keeps no mask for the backward pass, which runs each block again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: "Packing", kind: AttentionKind) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.packing, ctx.kind = packing, kind
        return _in_blocks(query, key, value, packing, kind)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
        for block in _blocks(ctx.packing, query.shape[1], ctx.kind):
            own = [query[block.queries], key[block.keys], value[block.keys]]
            with torch.enable_grad():
                q, k, v = (x.detach().requires_grad_() for x in own)
                out = block.attend(q, k, v, ctx.kind)
            of_q, of_k, of_v = torch.autograd.grad(out, (q, k, v), grads[0][block.queries])
            of_query[block.queries] = of_q
            of_key[block.keys] += of_k
            of_value[block.keys] += of_v
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None

"""Attention to the tokens that an indexer has chosen (see token_index.py), in blocks of queries.

In a packed row a mask hides the others, so that keys and values are read in place, and memory grows with the length of
a sequence, not with its square. In a cache each query has copies of the latent vectors that it sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..shapes.parts.windows import queries_of_choice, queries_of_copies
from .attention_kind import AttentionKind

if TYPE_CHECKING:
    from .attention import Packing


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

"""Attention over packed sequences for training, prefill and decoding, behind transformers' attention interface.

A forward pass runs one packed row [1, tokens]; `Packing` says which tokens belong together. Sequences never share an
attention row, so a NaN in one cannot reach another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .attention_kind import AttentionKind, Sinks
from .blockwise_attention import attend_in_chunks, attend_to_chosen, gradients_in_chunks
from .kernels import Kernels, kernels_for

if TYPE_CHECKING:
    from .recurrence import Recurrence
    from .token_index import IndexKind, IndexQueries

ATTENTION = "trainhouse_packed"

Layout = TypeVar("Layout")


@dataclass(frozen=True)
class SequenceGroup:
    """`count` consecutive sequences of equal length; the first starts at token `start` of the packed row."""

    start: int
    count: int
    length: int


@dataclass(frozen=True)
class Packing:
    """The sequences of a packed row in order, all without cached tokens; consecutive equal lengths form one group."""

    groups: tuple[SequenceGroup, ...]
    cumulative: dict[torch.device, Tensor] = field(default_factory=dict)
    layouts: dict[tuple[object, ...], Any] = field(default_factory=dict, init=False)

    @property
    def num_tokens(self) -> int:
        last = self.groups[-1]
        return last.start + last.count * last.length

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(group.length for group in self.groups)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [group.length for group in self.groups for _ in range(group.count)]

    def in_parts(self, size: int) -> "Packing":
        """Returns the packing whose sequences are the parts of these, of `size` tokens, the last of each of fewer."""
        if self.longest <= size:
            return self
        key = "parts", size
        if key not in self.layouts:
            starts = [(start, length) for length in self.lengths for start in range(0, length, size)]
            self.layouts[key] = Packing(pack_lengths([min(size, length - start) for start, length in starts]))
        return self.layouts[key]

    def bounds(self, device: torch.device) -> Tensor:
        """Returns the start of each sequence, and the end: int32 [sequences + 1], computed once for all layers."""
        if device not in self.cumulative:
            self.cumulative[device] = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=device)
        return self.cumulative[device]

    def layout(self, kind: "Callable[[Packing, torch.device, int], Layout]", device: torch.device, size: int) -> Layout:
        """Returns kind(packing, device, size), computed once for all layers."""
        key = kind, device, size
        if key not in self.layouts:
            self.layouts[key] = kind(self, device, size)
        return self.layouts[key]


class AttendingPacking(Protocol):
    """The sequences of a packed row, some of which have earlier tokens in a KV cache."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, including those in the cache."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Computes the function `attend`, and stores the keys and values."""
        ...

    def recur(self, op: "Recurrence", inputs: Sequence[Tensor]) -> Tensor:
        """Computes the function `recur`, and stores the states."""
        ...

    def choose(self, queries: "IndexQueries | None", key: Tensor, kind: "IndexKind") -> Tensor | None:
        """Computes the function `choose`, and stores the keys."""
        ...


def pack_lengths(lengths: list[int]) -> tuple[SequenceGroup, ...]:
    """Groups consecutive sequences of equal length, which are attended as one batch."""
    groups: list[SequenceGroup] = []
    start = 0
    for length in lengths:
        last = groups[-1] if groups else None
        if last and last.length == length:
            groups[-1] = SequenceGroup(last.start, last.count + 1, length)
        else:
            groups.append(SequenceGroup(start, 1, length))
        start += length
    return tuple(groups)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | AttendingPacking,
    scaling: float,
    **options: object,
) -> tuple[Tensor, None]:
    """Returns the attention output [1, tokens, heads, head_dim].

    query is [1, heads, tokens, head_dim], key and value the same with kv_heads. The signature is that of transformers'
    AttentionInterface; `packing` arrives through the model's keyword arguments.
    """
    del attention_mask  # named so because models pass it by keyword; the packing replaces it
    layer = module.layer_idx
    assert isinstance(layer, int)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window: Any = options["sliding_window"] if "sliding_window" in options else window_in_mask(module)
    sinks: Any = options.get("s_aux")
    cap: Any = options.get("softcap")
    kind = AttentionKind(layer, scaling, window, None if sinks is None else Sinks(sinks), cap=cap)
    return attend(q, k, v, packing, kind).unsqueeze(0), None


def window_in_mask(module: Any) -> int | None:
    """Returns the window of a layer that leaves its window to transformers' mask."""
    of_all_layers = module.config.sliding_window if module.config.model_type == "phimoe" else None
    return getattr(module, "sliding_window", of_all_layers)


def attend(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing | AttendingPacking, kind: AttentionKind
) -> Tensor:
    """Returns the attention output, of the query's shape.

    Args:
        query: [tokens, heads, head_dim].
        key: [tokens, kv_heads, head_dim], like `value`, which may have another size if there are kernels_for these and
            all keys before a query are seen: that of the output then.
    """
    if not isinstance(packing, Packing):
        return packing.attend(query, key, value, kind)
    if kind.chosen is not None:
        return attend_to_chosen(query, key, value, packing, kind)
    if kind.part is not None:
        packing, kind = packing.in_parts(kind.part), replace(kind, part=None)
    if query.is_cuda and fits_flash_on_gpu(query, kind):
        return _FlashOnGpu.apply(query, key, value, packing, kind)  # pyright: ignore[reportReturnType]
    kernels = kernels_for(query, key, value) if kind.cap is None else None
    if kernels is not None:
        return _ByRow.apply(query, key, value, packing, kind, kernels)  # pyright: ignore[reportReturnType]
    if query.is_cpu or kind.sinks is not None or kind.cap is not None:
        return _ByGroup.apply(query, key, value, packing, kind)  # pyright: ignore[reportReturnType]
    return join_groups([_scaled_dot_product(query, key, value, group, kind) for group in packing.groups])


def rows_by_group(x: Tensor, group: SequenceGroup) -> Tensor:
    """Returns a view [count, heads, length, head_dim] of a group's sequences in x [tokens, heads, head_dim]."""
    part = x[group.start : group.start + group.count * group.length]
    return part.unflatten(0, (group.count, group.length)).transpose(1, 2)


def join_groups(parts: list[Tensor]) -> Tensor:
    """Concatenates the groups' [count, heads, length, head_dim] to [tokens, heads, head_dim]."""
    tokens = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def _scaled_dot_product(query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup, kind: AttentionKind) -> Tensor:
    q, k, v = rows_by_group(query, group), rows_by_group(key, group), rows_by_group(value, group)
    gqa, parts = q.shape[1] != k.shape[1], []
    for view in kind.query_blocks(group.length, q.device, q.dtype):
        part, seen = q[:, :, view.queries], (k[:, :, view.keys], v[:, :, view.keys])
        parts.append(
            scaled_dot_product_attention(
                part, *seen, attn_mask=view.mask, is_causal=view.mask is None, scale=kind.scaling, enable_gqa=gqa
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def fits_flash_on_gpu(query: Tensor, kind: AttentionKind) -> bool:
    """True if flash attention supports this: scores without a cap, 16 bit, head sizes that are multiples of 8 up to
    256, Ampere or newer."""
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and kind.cap is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def flash_on_gpu(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, kind: AttentionKind
) -> tuple[Tensor, Tensor]:
    """Attends all sequences in one kernel. Calls aten: torch's varlen_attn takes four times as long to launch it.

    Returns:
        the output, and the log-sum-exp of the scores and sinks, float32 [heads, tokens].
    """
    bounds, longest = packing.bounds(query.device), packing.longest
    return flash_of_last_queries(query, key, value, (bounds, bounds), (longest, longest), kind)


def flash_of_last_queries(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    kind: AttentionKind,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Computes `flash_on_gpu` for sequences that may have more keys than queries: the queries are their last tokens.

    Args:
        bounds: for queries and for keys, see Packing.bounds.
        longest: the most queries and the most keys of a sequence.
        is_causal: whether tokens do not see those after them.
    """
    window = _window_of_flash(kind) if is_causal else {}
    out, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *bounds, *longest, 0.0, is_causal and not kind.window, False, scale=kind.scaling, **window
    )
    return out, log_sums if kind.sinks is None else kind.sinks.join(out.transpose(0, 1), log_sums)


def flash_gradients_on_gpu(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    packing: Packing,
    kind: AttentionKind,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value of `flash_on_gpu`."""
    bounds, longest = packing.bounds(query.device), packing.longest
    of_dropout = torch.empty(2, dtype=torch.uint64, device=query.device)  # not used
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(),
        query,
        key,
        value,
        out,
        log_sums,
        bounds,
        bounds,
        longest,
        longest,
        0.0,
        not kind.window,
        of_dropout,
        of_dropout,
        scale=kind.scaling,
        **_window_of_flash(kind),
    )


def _window_of_flash(kind: AttentionKind) -> dict[str, int]:
    """Returns the tokens that a query sees before and after its own; -1 for all."""
    return {"window_size_left": kind.window - 1 if kind.window else -1, "window_size_right": 0}


class _FlashOnGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, kind: AttentionKind) -> Tensor:
        out, log_sums = flash_on_gpu(query, key, value, packing, kind)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.packing, ctx.kind = packing, kind
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums = ctx.saved_tensors
        gradients = flash_gradients_on_gpu(grads[0], query, key, value, out, log_sums, ctx.packing, ctx.kind)
        if ctx.kind.sinks is not None:
            ctx.kind.sinks.add_gradient(grads[0].transpose(0, 1), out.transpose(0, 1), log_sums)
        return *gradients, None, None


def attend_group(query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> tuple[Tensor, Tensor]:
    """Attends sequences of one length, where there is no flash attention for all lengths at once.

    Args:
        query: [count, heads, length, head_dim]; key and value have kv_heads.
    Returns:
        the output, and the log-sum-exp of the scores and sinks, float32 [count, heads, length].
    """
    out, log_sums = (flash_on_cpu if _fits_flash_on_cpu(query, kind) else attend_in_chunks)(query, key, value, kind)
    return out, log_sums if kind.sinks is None else kind.sinks.join(out, log_sums)


def group_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, kind: AttentionKind
) -> tuple[Tensor, ...]:
    """Returns the gradients of query, key and value of `attend_group`, given its results."""
    gradients = flash_gradients_on_cpu if _fits_flash_on_cpu(query, kind) else gradients_in_chunks
    return gradients(grad, query, key, value, out, log_sums, kind)


def _fits_flash_on_cpu(query: Tensor, kind: AttentionKind) -> bool:
    return query.is_cpu and kind.cap is None


def flash_on_cpu(query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> tuple[Tensor, Tensor]:
    """Computes `attend_group` without sinks by torch's kernel for the CPU."""
    flash, parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, []
    for view in kind.query_blocks(query.shape[2], query.device, query.dtype):
        q, k, v = query[:, :, view.queries], key[:, :, view.keys], value[:, :, view.keys]
        parts.append(flash(q, k, v, 0.0, view.mask is None, attn_mask=view.mask, scale=kind.scaling))
    if len(parts) == 1:
        return parts[0]
    outs, log_sums = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(log_sums, dim=2)


def attend_last_tokens(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kind: AttentionKind) -> Tensor:
    """Returns the attention output of the last tokens of sequences, where flash attention on a GPU does not apply.

    Args:
        query: [count, heads, queries, head_dim]; key and value are [count, kv_heads, tokens, head_dim].
        mask: added to the scores, [queries, tokens]; None if queries see all tokens.
    """
    if kind.sinks is None and kind.cap is None:
        gqa = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=kind.scaling, enable_gqa=gqa)
    if _fits_flash_on_cpu(query, kind):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sums = flash(query, key, value, 0.0, False, attn_mask=mask, scale=kind.scaling)
    else:
        assert mask is not None
        out, log_sums = attend_in_chunks(query, key, value, kind)
    if kind.sinks is not None:
        kind.sinks.join(out, log_sums)
    return out


def flash_gradients_on_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, kind: AttentionKind
) -> tuple[Tensor, ...]:
    """Returns the gradients of query, key and value of `flash_on_cpu`.

    Gradients of keys and values that are in several views are summed in float32.
    """
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
    for view in kind.query_blocks(query.shape[2], query.device, query.dtype):
        g, q, o, sums = (x[:, :, view.queries] for x in (grad, query, out, log_sums))
        k, v = key[:, :, view.keys], value[:, :, view.keys]
        parts = backward(g, q, k, v, o, sums, 0.0, view.mask is None, attn_mask=view.mask, scale=kind.scaling)
        if view.mask is None:
            return parts
        of_query[:, :, view.queries] = parts[0]
        of_key[:, :, view.keys] += parts[1]
        of_value[:, :, view.keys] += parts[2]
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype)


class _ByGroup(torch.autograd.Function):
    """Runs the groups one after the other; autograd would create a zero tensor of all tokens for each group."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, kind: AttentionKind) -> Tensor:
        outs, log_sums = [], []
        for group in packing.groups:
            q, k, v = (rows_by_group(x, group) for x in (query, key, value))
            found, log_sum = attend_group(q, k, v, kind)
            outs.append(found)
            log_sums.append(log_sum)
        out = join_groups(outs)
        ctx.save_for_backward(query, key, value, out, *log_sums)
        ctx.packing, ctx.kind = packing, kind
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *log_sums = ctx.saved_tensors
        (grad,) = grads
        parts = []
        for group, log_sum in zip(ctx.packing.groups, log_sums, strict=True):
            g, q, k, v, o = (rows_by_group(x, group) for x in (grad, query, key, value, out))
            parts.append(group_gradients(g, q, k, v, o, log_sum, ctx.kind))
            if ctx.kind.sinks is not None:
                ctx.kind.sinks.add_gradient(g, o, log_sum)
        gradients = [join_groups(list(of_groups)) for of_groups in zip(*parts, strict=True)]
        return (*gradients, None, None)


class _ByRow(torch.autograd.Function):
    """Runs kernels for whole rows."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packing: Packing,
        kind: AttentionKind,
        kernels: Kernels,
    ) -> Tensor:
        ctx.bounds, ctx.kind, ctx.kernels = packing.bounds(query.device), kind, kernels
        out, log_sums = kernels.attention(query, key, value, ctx.bounds, kind)
        if kind.sinks is not None:
            log_sums = kind.sinks.join(out.transpose(0, 1), log_sums)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums = ctx.saved_tensors
        (grad,) = grads
        if ctx.kind.sinks is not None:
            ctx.kind.sinks.add_gradient(grad.transpose(0, 1), out.transpose(0, 1), log_sums)
        gradients = ctx.kernels.attention_gradient(grad, query, key, value, out, log_sums, ctx.bounds, ctx.kind)
        return *gradients, None, None, None


# Registered without a mask function, so that transformers builds no mask: `Packing` defines what tokens see.
AttentionInterface.register(ATTENTION, packed_attention)

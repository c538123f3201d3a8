"""The kind of attention that a layer has: its scale, window, cap and sinks."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..shapes.parts.windows import queries_of_mask


@dataclass(frozen=True, eq=False)
class Sinks:
    """A learned score for each head, which takes part in every softmax but has no value.

    OpenAI, gpt-oss-120b and gpt-oss-20b Model Card (2025), https://arxiv.org/abs/2508.10925.

    parameter: [heads]. own: the heads of this attention; None for all.
    """

    parameter: Tensor
    own: slice | None = None

    @property
    def scores(self) -> Tensor:
        """The scores, float32 [heads]."""
        return self._own_of(self.parameter.detach()).float()

    def join(self, out: Tensor, log_sums: Tensor) -> Tensor:
        """Adds the sinks to a softmax over all keys.

        Args:
            out: the output [..., heads, queries, head_dim], which is scaled in place.
            log_sums: the log-sum-exp of the scores, float32 [..., heads, queries].
        Returns:
            the log-sum-exp of the scores and sinks.
        """
        joined = torch.logaddexp(log_sums, self.scores[:, None])
        out.mul_((log_sums - joined).exp_().unsqueeze(-1))
        return joined

    def add_gradient(self, grad: Tensor, out: Tensor, log_sums: Tensor) -> None:
        """Adds to the parameter's gradient, if it has one, given the gradient of the output and the results of
        `join`."""
        if self.parameter.grad is not None:
            along = torch.linalg.vecdot(grad.float(), out.float())
            of_scores = along.mul_((self.scores[:, None] - log_sums).exp_()).sum(-1)
            self._own_of(self.parameter.grad).sub_(of_scores.view(-1, of_scores.shape[-1]).sum(0))

    def of_heads(self, first: int, number: int) -> "Sinks":
        """Returns `number` of the sinks, from the head `first` on."""
        start = first if self.own is None else self.own.start + first
        return Sinks(self.parameter, slice(start, start + number))

    def _own_of(self, whole: Tensor) -> Tensor:
        return whole if self.own is None else whole[self.own]


@dataclass(frozen=True)
class AttentionKind:
    """Holds what differs between the attention of layers.

    layer: its index, in the cache too. is_stored: whether the keys and values are those of an earlier layer, which has
    stored them there. window: how many tokens a token sees, itself included; None for all before it.
    sinks: of the query's heads. values_are_keys: whether the values are the keys, so that a cache keeps only these.
    part: the tokens of the parts of a sequence that do not see each other; None for no parts.
    cap: the absolute value that scaled scores approach, as cap * tanh(score / cap); None for no limit. Fused kernels
    for whole sequences cannot compute it.
    chosen: the tokens that each token of a row sees (see token_index.choose), int32 [tokens, most]; None for all.
    """

    layer: int
    scaling: float
    window: int | None = None
    sinks: Sinks | None = field(default=None, compare=False)
    values_are_keys: bool = False
    cap: float | None = None
    part: int | None = None
    is_stored: bool = False
    chosen: Tensor | None = field(default=None, compare=False)

    @property
    def is_latent(self) -> bool:
        """True if all keys before a token are seen as they are, and are the values too."""
        changes = self.window, self.sinks, self.cap, self.part
        return self.values_are_keys and all(each is None for each in changes)

    def within(self, length: int) -> "AttentionKind":
        """Returns the kind for sequences of at most `length` tokens, without parts if they have only one."""
        return replace(self, part=None) if self.part is not None and length <= self.part else self

    def choosing(self, chosen: Tensor | None) -> "AttentionKind":
        return self if chosen is None else replace(self, chosen=chosen)

    def of_rows(self, rows: slice | Tensor, longest: int) -> "AttentionKind":
        """Returns the kind for some tokens of the row, whose sequences have at most `longest` tokens."""
        if self.chosen is None:
            return self
        sees_all = longest <= self.chosen.shape[1]
        return replace(self, chosen=None if sees_all else self.chosen[rows])

    def of_heads(self, first: int, number: int) -> "AttentionKind":
        return self if self.sinks is None else replace(self, sinks=self.sinks.of_heads(first, number))

    def query_blocks(self, length: int, device: torch.device, dtype: torch.dtype) -> Iterator["QueryBlock"]:
        """Yields one view if causal attention is enough for this length, else one per block of queries."""
        window = self.window
        if not window or window >= length:
            yield QueryBlock(slice(0, length), slice(0, length), None)
            return
        step = min(queries_of_mask(window), length)
        mask = _window_mask(window, step, device, dtype)
        for start in range(0, length, step):
            stop, before = min(start + step, length), min(start, window - 1)
            first = window - 1 - before
            keys = slice(start - before, stop)
            yield QueryBlock(slice(start, stop), keys, mask[: stop - start, first : first + stop - start + before])


@dataclass(frozen=True)
class QueryBlock:
    """The keys that some queries of a sequence see.

    mask: added to the scores, [queries, keys]; None for causal attention.
    """

    queries: slice
    keys: slice
    mask: Tensor | None


def _window_mask(window: int, num_queries: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns the mask [queries, queries + window - 1] of consecutive queries.

    The first query sees the first `window` keys.
    """
    shape = num_queries, num_queries + window - 1
    seen = torch.ones(shape, dtype=torch.bool, device=device).tril_(window - 1).triu_()
    return torch.zeros(shape, dtype=dtype, device=device).masked_fill_(seen.logical_not_(), float("-inf"))

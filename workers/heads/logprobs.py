"""The output head: log-probabilities of targets, for a chunk of tokens at a time, and their gradients.

The tokens of a chunk may belong to any adapters. No [tokens, vocabulary] tensor exists beyond one chunk.
Log-probabilities are float32 even if the base model is bfloat16.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy

import torch
from torch import Tensor

from ..lora import LoraPair, Segment
from ..lora.segment import clip_segments
from ..models.model import BaseModel
from ..ops.kernels import layer_kernels
from ..ops.linear import add_product, soft_cap_derivatives, soft_capped


class LogprobHead:
    """Has no state but the frozen weights. Segments say which adapter's part of the output head each token uses."""

    def __init__(self, base: BaseModel, chunk_tokens: int) -> None:
        self.unembedding, self.bias = base.unembedding, base.head_bias
        self.product, self.cap = base.product, base.logit_cap
        self._base = base
        # The derivatives of capped logits take as much memory as the logits.
        self.chunk_tokens = chunk_tokens if self.cap is None else max(1, chunk_tokens // 2)

    def split_budget(self, number: int) -> "LogprobHead":
        """Returns one of `number` concurrent heads. Together they hold as many logits as a single one."""
        part = copy(self)
        part.chunk_tokens = max(1, self.chunk_tokens // number)
        return part

    def gathered(self) -> AbstractContextManager[None]:
        """Holds the whole unembedding. Outside the context, each rank may keep only a part of it."""
        return self._base.weights.whole_unembedding()

    def start_pass(self, hidden: Tensor, segments: Sequence[Segment], targets: Tensor) -> "_LogprobPass":
        """Starts a pass whose scores are the log-probabilities of the targets."""
        return _LogprobPass(self, hidden, segments, targets)

    @torch.no_grad()
    def logits(self, hidden: Tensor, pair: LoraPair | None) -> Tensor:
        """Computes logits, [n, hidden] -> float32 [n, vocab]. The caller bounds n."""
        logits = self.product(hidden, self.unembedding, self.bias)
        if pair is not None:
            pair.add_terms(logits, hidden)
        return soft_capped(logits.float(), self.cap)

    def logits_of_segments(self, hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Computes logits for hidden states of several adapters, [n, hidden] -> float32 [n, vocab]."""
        return soft_capped(self.uncapped_logits(hidden, segments).float(), self.cap)

    @torch.no_grad()
    def uncapped_logits(self, hidden: Tensor, segments: Sequence[Segment], out: Tensor | None = None) -> Tensor:
        """Computes logits before their cap like `logits_of_segments`, in the precision of the hidden states.

        Args:
            out: float32 [n, vocab], in which they are computed if the product can.
        """
        if out is not None and self.product.is_torch and hidden.dtype == out.dtype:
            logits = torch.mm(hidden, self.unembedding.t(), out=out)
            if self.bias is not None:
                logits.add_(self.bias)
        else:
            logits = self.product(hidden, self.unembedding, self.bias)
        for segment, pair in _with_pair(segments):
            tokens = slice(segment.start, segment.stop)
            pair.add_terms(logits[tokens], hidden[tokens])
        return logits


class _LogprobPass:
    """Implements HeadPass. All chunks reuse one buffer for their logits.

    With a new tensor for each chunk, glibc before 2.38 would rarely reuse the memory of the last one, because torch
    wants it aligned. Memory would then grow as if all logits were kept.
    """

    def __init__(self, head: LogprobHead, hidden: Tensor, segments: Sequence[Segment], targets: Tensor) -> None:
        self._head, self._hidden, self._segments, self._targets = head, hidden, segments, targets
        self.chunk_tokens = head.chunk_tokens
        num_tokens = min(head.chunk_tokens, len(hidden))
        self._buffer = torch.empty(num_tokens, len(head.unembedding), device=hidden.device)
        self._selection: Tensor | None = None
        self._derivatives = None if head.cap is None else torch.empty_like(self._buffer)
        self._chunk = slice(0, 0)
        self._logits = self._buffer  # the part of it that the last chunk uses

    def scores(self, tokens: slice) -> Tensor:
        self._chunk, self._logits = tokens, self._buffer[: tokens.stop - tokens.start]
        head, hidden, targets = self._head, self._hidden[tokens], self._targets[tokens]
        logits = head.uncapped_logits(hidden, clip_segments(self._segments, tokens), self._logits).float()
        if head.cap is not None and self._derivatives is not None:
            logits = soft_capped(logits, head.cap)
            soft_cap_derivatives(logits, head.cap, out=self._derivatives[: len(logits)])
        logprobs = layer_kernels(logits).log_softmax(logits, self._logits)
        return logprobs.gather(1, targets) if targets.ndim == 2 else logprobs.gather(1, targets[:, None]).squeeze(1)

    def backward(self, gradient: Tensor, hidden_gradient: Tensor) -> None:
        """Computes the gradients of the last chunk, in the buffer of its logits.

        Tokens whose scores have no gradient are skipped: theirs is exactly 0, even if their logits are not finite.
        """
        logprobs, hidden, targets = self._logits, self._hidden[self._chunk], self._targets[self._chunk]
        derivatives = None if self._derivatives is None else self._derivatives[: len(hidden)]
        segments = clip_segments(self._segments, self._chunk)
        has_gradient = gradient != 0 if gradient.ndim == 1 else (gradient != 0).any(dim=1)
        if bool(has_gradient.all()):
            found = self._gradient_of(logprobs, derivatives, targets, gradient, hidden, segments)
            hidden_gradient.copy_(found)
            return
        hidden_gradient.zero_()
        some = has_gradient.nonzero().squeeze(1)
        if len(some):
            derivatives = None if derivatives is None else derivatives[some]
            logprobs, segments = self._select(logprobs, some), _among(segments, some)
            hidden_gradient[some] = self._gradient_of(
                logprobs, derivatives, targets[some], gradient[some], hidden[some], segments
            )

    def _gradient_of(
        self,
        logprobs: Tensor,
        derivatives: Tensor | None,
        targets: Tensor,
        d_logprobs: Tensor,
        hidden: Tensor,
        segments: Sequence[Segment],
    ) -> Tensor:
        """Applies d l_y / d logits = onehot(y) - softmax, and the derivatives of the cap if there is one."""
        d_targets = d_logprobs if d_logprobs.ndim == 2 else d_logprobs[:, None]
        d_logits = layer_kernels(logprobs).scaled_exponentials(logprobs, -d_targets.sum(dim=1))
        d_logits.scatter_add_(1, targets if targets.ndim == 2 else targets[:, None], d_targets)
        if derivatives is not None:
            d_logits.mul_(derivatives)
        d_logits = d_logits.to(hidden.dtype)
        d_hidden = self._head.product(d_logits, self._head.unembedding.t())
        if self._head.unembedding.grad is not None:
            add_product(self._head.unembedding.grad, d_logits, hidden)
        if self._head.bias is not None and self._head.bias.grad is not None:
            self._head.bias.grad.add_(d_logits.sum(0, dtype=torch.float32))
        for segment, pair in _with_pair(segments):
            tokens = slice(segment.start, segment.stop)
            pair.backward(d_logits[tokens], hidden[tokens], d_hidden[tokens])
        return d_hidden

    def _select(self, logprobs: Tensor, tokens: Tensor) -> Tensor:
        """Returns a copy of the rows of these tokens, int64, valid until the next call."""
        if self._selection is None:
            self._selection = torch.empty_like(self._buffer)
        return torch.index_select(logprobs, 0, tokens, out=self._selection[: len(tokens)])


def _among(segments: Sequence[Segment], tokens: Tensor) -> list[Segment]:
    """Returns the segments of a selection of tokens, int64 in ascending order, counted within the selection."""
    if not any(True for _ in _with_pair(segments)):
        return []
    borders = torch.tensor([[segment.start, segment.stop] for segment in segments], device=tokens.device)
    return [
        Segment(start, stop, segment.model)
        for segment, (start, stop) in zip(segments, torch.searchsorted(tokens, borders).tolist(), strict=True)
        if start < stop
    ]


def _with_pair(segments: Sequence[Segment]) -> Iterator[tuple[Segment, LoraPair]]:
    """Yields the segments whose adapter has a part of the output head."""
    for segment in segments:
        pair = segment.adapter.unembed if segment.adapter is not None else None
        if pair is not None:
            yield segment, pair

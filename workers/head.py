"""The unembedding: log-probabilities a chunk of rows at a time, and the gradient of the loss in the same pass.

No [tokens, vocabulary] tensor exists beyond one chunk. Log-probabilities are float32 for a bf16 base too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .lora import LoraPair, Segment, frozen_product
from .losses import Loss, LossOutput
from .model import BaseModel


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss of n rows that are whole sequences of one operation.

    targets: int64 [n] or [n, K]; inputs: float32 of the same shape. weight: multiplies the loss.
    bounds: where each sequence starts, and n.
    """

    loss: Loss
    config: Mapping[str, float]
    weight: float
    targets: Tensor
    inputs: Mapping[str, Tensor]
    bounds: tuple[int, ...]

    def evaluate(self, logprobs: Tensor, rows: slice) -> LossOutput:
        """logprobs: those of `rows`. Sequence-wise losses need all of a sequence's rows."""
        inputs = {name: value[rows] for name, value in self.inputs.items()}
        if not self.loss.sequence_wise:
            return self._weighted(self.loss.function(logprobs, inputs, self.config))
        parts = []
        for start, stop in pairwise(self.bounds):
            sequence = {name: value[start:stop] for name, value in inputs.items()}
            parts.append(self.loss.function(logprobs[start:stop], sequence, self.config))
        sums = {name: torch.stack([part.sums[name] for part in parts]).sum() for name in parts[0].sums}
        return self._weighted(LossOutput(torch.cat([part.losses for part in parts]), sums))

    def gradient(self, logprobs: Tensor, rows: slice) -> tuple[LossOutput, Tensor]:
        """The detached loss, and its gradient by the log-probabilities."""
        with torch.enable_grad():
            leaf = logprobs.detach().requires_grad_()
            output = self.evaluate(leaf, rows)
            (gradient,) = torch.autograd.grad(output.losses.sum(), leaf)
        return LossOutput(output.losses.detach(), output.sums), gradient

    def _weighted(self, output: LossOutput) -> LossOutput:
        return output if self.weight == 1.0 else LossOutput(self.weight * output.losses, output.sums)


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """logprobs, losses: float32 [n] or [n, K]. sums: see LossOutput."""

    logprobs: Tensor
    losses: Tensor
    sums: Mapping[str, Tensor]


class Head:
    """Stateless but for the frozen weights. `pair` is the adapter's part of the output head, None where it has none."""

    def __init__(self, base: BaseModel, chunk_rows: int) -> None:
        self._unembedding = base.unembedding
        self._product = frozen_product(base)
        self._chunk_rows = chunk_rows

    @torch.no_grad()
    def logits(self, hidden: Tensor, pair: LoraPair | None) -> Tensor:
        """hidden [n, hidden] -> float32 [n, vocab]; the caller bounds n."""
        logits = self._product(hidden, self._unembedding)
        if pair is not None:
            pair.add_up(logits, pair.down(hidden))
        return logits.float()

    @torch.no_grad()
    def logits_of_segments(self, hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
        """As `logits`, for rows of several adapters: hidden [n, hidden] -> float32 [n, vocab]."""
        logits = self._product(hidden, self._unembedding)
        for segment in segments:
            pair = segment.adapter.unembed if segment.adapter is not None else None
            if pair is not None:
                rows = slice(segment.start, segment.stop)
                pair.add_up(logits[rows], pair.down(hidden[rows]))
        return logits.float()

    @torch.no_grad()
    def logprobs(self, hidden: Tensor, pair: LoraPair | None, targets: Tensor) -> Tensor:
        """hidden [n, hidden], targets int64 [n] or [n, K] -> float32 of the targets' shape."""
        parts = [_gather(self._log_softmax(hidden[rows], pair), targets[rows]) for rows in self._chunks(len(hidden))]
        return torch.cat(parts)

    @torch.no_grad()
    def loss(self, hidden: Tensor, pair: LoraPair | None, objective: Objective) -> HeadOutput:
        """The loss of hidden [n, hidden], without gradients."""
        logprobs = self.logprobs(hidden, pair, objective.targets)
        output = objective.evaluate(logprobs, slice(None))
        return HeadOutput(logprobs, output.losses, output.sums)

    @torch.no_grad()
    def loss_and_gradient(
        self, hidden: Tensor, pair: LoraPair | None, objective: Objective, gradient: Tensor
    ) -> HeadOutput:
        """Writes the gradient by hidden [n, hidden] to `gradient`, and adds the pair's to the adapter's scratch.

        A sequence-wise loss takes a second pass: the loss of whole sequences must be known before any gradient.
        """
        if objective.loss.sequence_wise:
            return self._in_two_passes(hidden, pair, objective, gradient)
        parts = []
        for rows in self._chunks(len(hidden)):
            log_softmax = self._log_softmax(hidden[rows], pair)
            logprobs = _gather(log_softmax, objective.targets[rows])
            output, d_logprobs = objective.gradient(logprobs, rows)
            self._backward(log_softmax, objective.targets[rows], d_logprobs, hidden[rows], pair, gradient[rows])
            parts.append(HeadOutput(logprobs, output.losses, output.sums))
        return _joined(parts)

    def _in_two_passes(
        self, hidden: Tensor, pair: LoraPair | None, objective: Objective, gradient: Tensor
    ) -> HeadOutput:
        logprobs = self.logprobs(hidden, pair, objective.targets)
        output, d_logprobs = objective.gradient(logprobs, slice(None))
        for rows in self._chunks(len(hidden)):
            log_softmax = self._log_softmax(hidden[rows], pair)
            self._backward(log_softmax, objective.targets[rows], d_logprobs[rows], hidden[rows], pair, gradient[rows])
        return HeadOutput(logprobs, output.losses, output.sums)

    def _log_softmax(self, hidden: Tensor, pair: LoraPair | None) -> Tensor:
        return torch.log_softmax(self.logits(hidden, pair), dim=-1)

    def _chunks(self, num_rows: int) -> Iterator[slice]:
        return (slice(i, min(i + self._chunk_rows, num_rows)) for i in range(0, num_rows, self._chunk_rows))

    def _backward(
        self,
        log_softmax: Tensor,
        targets: Tensor,
        d_logprobs: Tensor,
        hidden: Tensor,
        pair: LoraPair | None,
        gradient: Tensor,
    ) -> None:
        """The gradient of one chunk, which it takes over log_softmax's memory for.

        Rows without a gradient are left out: it is exactly 0 there, whatever the logits are, and costs nothing.
        """
        has_gradient = d_logprobs != 0 if d_logprobs.ndim == 1 else (d_logprobs != 0).any(dim=1)
        if bool(has_gradient.all()):
            gradient.copy_(self._hidden_gradient(log_softmax, targets, d_logprobs, hidden, pair))
            return
        gradient.zero_()
        rows = has_gradient.nonzero().squeeze(1)
        if len(rows):
            gradient[rows] = self._hidden_gradient(
                log_softmax[rows], targets[rows], d_logprobs[rows], hidden[rows], pair
            )

    def _hidden_gradient(
        self, log_softmax: Tensor, targets: Tensor, d_logprobs: Tensor, hidden: Tensor, pair: LoraPair | None
    ) -> Tensor:
        """d l_y / d logits = onehot(y) - softmax."""
        d_targets = d_logprobs if d_logprobs.ndim == 2 else d_logprobs[:, None]
        d_logits = log_softmax.exp_().mul_(-d_targets.sum(dim=1, keepdim=True))
        d_logits.scatter_add_(1, targets if targets.ndim == 2 else targets[:, None], d_targets)
        d_logits = d_logits.to(hidden.dtype)
        d_hidden = self._product(d_logits, self._unembedding.t())
        if pair is not None:
            pair.backward(d_logits, hidden, pair.down(hidden), d_hidden)
        return d_hidden


def _gather(log_softmax: Tensor, targets: Tensor) -> Tensor:
    if targets.ndim == 2:
        return log_softmax.gather(1, targets)
    return log_softmax.gather(1, targets[:, None]).squeeze(1)


def _joined(parts: list[HeadOutput]) -> HeadOutput:
    return HeadOutput(
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.losses for part in parts]),
        {name: torch.stack([part.sums[name] for part in parts]).sum() for name in parts[0].sums},
    )

"""Evaluates the loss of neighbouring rows of a micro-batch on their scores."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..losses import Loss, LossOutput


@dataclass(frozen=True, eq=False)
class Objective:
    """Rows start:stop of a micro-batch, n in all: whole sequences of operations that agree in loss, config and weight.

    targets: int64 [n] or [n, K]. inputs: float32, in the same shape. weight: a factor of the loss.
    bounds: where each sequence starts, and at the end n.
    """

    start: int
    stop: int
    loss: Loss
    config: Mapping[str, float]
    weight: float
    targets: Tensor
    inputs: Mapping[str, Tensor]
    bounds: tuple[int, ...]

    def evaluate(self, scores: Tensor, rows: slice) -> LossOutput:
        """Returns the loss for the scores of `rows`, counted from `start`. Sequence-wise losses need all n rows."""
        if self.loss.sequence_wise:
            return self._weighted(self._by_sequence(scores))
        return self._weighted(self._of(scores, rows))

    def gradient(self, scores: Tensor, rows: slice) -> tuple[LossOutput, Tensor]:
        """Returns the detached loss, and its gradient with respect to the scores."""
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            output = self.evaluate(leaf, rows)
            (gradient,) = torch.autograd.grad(output.losses.sum(), leaf)
        return LossOutput(output.losses.detach(), output.metrics), gradient

    def _of(self, scores: Tensor, rows: slice) -> LossOutput:
        inputs = {name: value[rows] for name, value in self.inputs.items()}
        return self.loss.function(scores, inputs, self.config)

    def _by_sequence(self, scores: Tensor) -> LossOutput:
        return join_outputs([self._of(scores[rows], rows) for rows in map(slice, self.bounds, self.bounds[1:])])

    def _weighted(self, output: LossOutput) -> LossOutput:
        return output if self.weight == 1.0 else LossOutput(self.weight * output.losses, output.metrics)


def join_outputs(parts: list[LossOutput]) -> LossOutput:
    """Concatenates the outputs for consecutive rows."""
    if len(parts) == 1:
        return parts[0]
    metrics = {name: torch.cat([part.metrics[name] for part in parts]) for name in parts[0].metrics}
    return LossOutput(torch.cat([part.losses for part in parts]), metrics)

"""Policies: a frozen causal LM with one LoRA adapter a run, trained by losses on the log-probabilities of tokens."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...schemas.errors import Category, OperationError
from ...schemas.training import ForwardBackwardOutput, ForwardBackwardRequest
from ..batch import MicroBatch, MicroBatchSegment, ModelLimits, Operation, pack, read_operation, unpack
from ..config import WorkerConfig
from ..head import Head, HeadOutput, Objective
from ..lora import Adapter, Adapters, Segment
from ..model import BaseModel
from ..verbs import Failure


@dataclass(eq=False)
class Progress:
    """An operation under way: what its micro-batches have given so far, and why it failed if it did."""

    operation: Operation
    adapter: Adapter
    forward_only: bool
    logprobs: list[np.ndarray | None]
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

    def take(self, segment: MicroBatchSegment, output: HeadOutput) -> None:
        self.loss += float(output.losses.sum(dtype=torch.float64))
        for name, value in output.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        unpack(segment, output.logprobs, self.operation, self.logprobs)

    def refuse(self, reason: str) -> None:
        self.failure = self.failure or f"{reason}; the operation contributes nothing"


class PolicyProgram:
    def __init__(self, base: BaseModel, adapters: Adapters, limits: ModelLimits, config: WorkerConfig) -> None:
        self._base = base
        self._adapters = adapters
        self._limits = limits
        self._head = Head(base, config.head_chunk_tokens)
        self._token_budget = config.micro_batch_tokens

    def run(self, request: ForwardBackwardRequest) -> ForwardBackwardOutput | Failure:
        """All or nothing: gradients join the run's accumulator only if every micro-batch succeeded."""
        if request.model_id not in self._adapters:
            return Failure(f"run {request.model_id} is not on this worker: create it first", "server")
        adapter = self._adapters.get(request.model_id)
        try:
            operation = read_operation(request, self._limits)
            progress = Progress(operation, adapter, request.forward_only, [None] * len(operation.rows))
            self._compute([progress])
        except OperationError as error:
            return self._failed(request, adapter, error.message, error.category)
        except torch.OutOfMemoryError as error:
            reason = f"out of memory: {error}; start the server with a smaller --micro-batch-tokens"
            return self._failed(request, adapter, reason, "server")
        except Exception as error:
            # The pool logs what nobody foresaw and fails the call; a step must not pass over what is missing.
            self._failed(request, adapter, f"{type(error).__name__}: {error}", "server")
            raise
        if progress.failure:
            return self._failed(request, adapter, progress.failure, "user")
        if not progress.forward_only:
            _commit(progress)
        return _output(progress)

    def _failed(self, request: ForwardBackwardRequest, adapter: Adapter, message: str, category: Category) -> Failure:
        """The window has lost a part of its batch, so its step is refused."""
        if not request.forward_only:
            adapter.window.refused = adapter.window.refused or message
        return Failure(message, category)

    def _compute(self, group: list[Progress]) -> None:
        """Operations whose tokens may share micro-batches: all of different runs, all with or all without gradients."""
        gradients = not group[0].forward_only
        for progress in group:
            if gradients:
                progress.adapter.begin_operation()
        for micro_batch in pack([progress.operation for progress in group], self._token_budget, self._base.device):
            self._run_micro_batch(micro_batch, group, gradients)
            if all(progress.failure for progress in group):
                return
        for progress in group:
            if gradients and not progress.failure and not progress.adapter.scratch_is_finite():
                progress.refuse(f"the gradient of {progress.operation.loss_name} is not finite")

    def _run_micro_batch(self, micro_batch: MicroBatch, group: list[Progress], gradients: bool) -> None:
        segments = [Segment(part.start, part.stop, group[part.operation].adapter) for part in micro_batch.segments]
        with torch.set_grad_enabled(gradients), self._adapters.applied(segments):
            hidden = self._base.hidden_states(micro_batch.tokens, micro_batch.positions, micro_batch.packing)
            gradient = torch.empty_like(hidden) if gradients else None
            for segment in micro_batch.segments:
                self._run_head(segment, group[segment.operation], hidden.detach(), gradient)
            if gradient is not None and hidden.requires_grad:
                hidden.backward(gradient)

    def _run_head(
        self, segment: MicroBatchSegment, progress: Progress, hidden: Tensor, gradient: Tensor | None
    ) -> None:
        rows = slice(segment.start, segment.stop)
        pair, objective = progress.adapter.unembed, _objective(segment, progress.operation)
        if gradient is None:
            output = self._head.loss(hidden[rows], pair, objective)
        else:
            output = self._head.loss_and_gradient(hidden[rows], pair, objective, gradient[rows])
        if reason := _not_finite(segment, output, progress.operation):
            progress.refuse(reason)
            if gradient is not None:
                # Others share this micro-batch: what failed must not reach the backward pass.
                gradient[rows] = 0
            return
        progress.take(segment, output)


def _objective(segment: MicroBatchSegment, operation: Operation) -> Objective:
    return Objective(
        operation.loss, operation.config, operation.weight, segment.targets, segment.inputs, segment.bounds
    )


def _not_finite(segment: MicroBatchSegment, output: HeadOutput, operation: Operation) -> str | None:
    """Which datum has a loss that is not finite. Log-probabilities may be infinite where nothing counts."""
    bad = ~torch.isfinite(output.losses) | torch.isnan(output.logprobs)
    if not bool(bad.any()):
        return None
    row = int(bad.nonzero()[0, 0])
    sequence = int(np.searchsorted(segment.bounds, row, side="right")) - 1
    datum, position = segment.datums[sequence], row - segment.bounds[sequence]
    if bool(torch.isnan(output.logprobs[row]).any()):
        return (
            f"datum {datum}: the model's log-probability at position {position} is NaN: its weights have diverged;"
            " go on from an earlier checkpoint with a lower learning rate"
        )
    return (
        f"datum {datum}: the {operation.loss_name} loss at position {position} is not finite, the model's"
        f" log-probability is {output.logprobs[row].tolist()}: check its advantages, weights and logprobs"
    )


def _commit(progress: Progress) -> None:
    operation = progress.operation
    progress.adapter.commit(operation.num_tokens, operation.denominator, {f"loss/{operation.loss_name}": progress.loss})


def _output(progress: Progress) -> ForwardBackwardOutput:
    operation = progress.operation
    means = {f"{name}:mean": value / max(operation.num_tokens, 1) for name, value in progress.sums.items()}
    outputs = tuple({"logprobs": array} for array in progress.logprobs if array is not None)
    assert len(outputs) == len(operation.rows), "a datum was in no micro-batch"
    totals = {"loss:sum": progress.loss, "num_tokens:sum": float(operation.num_tokens)}
    return ForwardBackwardOutput(outputs, totals | means)

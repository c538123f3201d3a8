"""An operation on its way through one or several passes: what its finished parts gave, and the part under way."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ...schemas.training import ForwardBackwardOutput
from ..batch import MicroBatchSegment, cut
from ..head import HeadOutput
from ..lora import Adapter
from ..operation import Operation
from ..verbs import Failure, Part

Answer = ForwardBackwardOutput | Failure | None


@dataclass
class Totals:
    """loss, metrics: sums over positions. denominator: see Loss.denominator."""

    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    denominator: float = 0.0

    def add(self, other: "Totals") -> None:
        self.loss += other.loss
        self.num_tokens += other.num_tokens
        self.denominator += other.denominator
        for name, value in other.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value


@dataclass(eq=False)
class Progress:
    """The finished parts of an operation.

    logprobs: by datum. gradient: the sum of theirs, float32 [P], in host memory because adapters leave the device
    between passes; None where there is none.
    """

    run_id: str
    logprobs: list[np.ndarray] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    gradient: Tensor | None = None

    def output(self) -> ForwardBackwardOutput:
        totals = self.totals
        means = {f"{name}:mean": value / max(totals.num_tokens, 1) for name, value in totals.metrics.items()}
        sums = {"loss:sum": totals.loss, "num_tokens:sum": float(totals.num_tokens)}
        return ForwardBackwardOutput(tuple({"logprobs": array} for array in self.logprobs), sums | means)


@dataclass(frozen=True, eq=False)
class Scores:
    """A HeadOutput in host memory: each float32 [n] or [n, K]."""

    logprobs: np.ndarray
    losses: np.ndarray
    metrics: dict[str, np.ndarray]

    @staticmethod
    def of(output: HeadOutput) -> "Scores":
        metrics = {name: _numpy(values) for name, values in output.scored.metrics.items()}
        return Scores(_numpy(output.logprobs), _numpy(output.scored.losses), metrics)

    def of_rows(self, rows: slice) -> "Scores":
        return Scores(self.logprobs[rows], self.losses[rows], {name: each[rows] for name, each in self.metrics.items()})


class Task:
    """A part of an operation, in the pass that runs it.

    failure: why it contributes nothing, by its own fault. answer: when `done`.
    """

    def __init__(self, part: Part, operation: Operation, progress: Progress) -> None:
        self.part = part
        self.operation = operation
        self.progress = progress
        self.answer: Answer = None
        self.done = False
        self.begin()

    @property
    def run_id(self) -> str:
        return self.part.request.model_id

    @property
    def forward_only(self) -> bool:
        return self.part.request.forward_only

    def begin(self) -> None:
        """From the start, whatever an attempt before this one has left."""
        self.failure: str | None = None
        # By the first datum of each segment: lanes bring them in any order, and sums of them are to be the same.
        self._totals: dict[int, Totals] = {}
        self._logprobs: list[np.ndarray | None] = [None] * len(self.operation.rows)

    def take(self, segment: MicroBatchSegment, scores: Scores) -> None:
        """Refuses the operation where its loss is not finite."""
        if reason := _not_finite(segment, scores, self.operation):
            self.refuse(reason)
            return
        metrics = {name: _sum(values) for name, values in scores.metrics.items()}
        self._totals[segment.datums[0]] = Totals(_sum(scores.losses), metrics)
        for datum, logprobs in cut(segment, scores.logprobs, self.operation):
            self._logprobs[datum] = logprobs

    def refuse(self, reason: str) -> None:
        self.failure = self.failure or f"{reason}; the operation contributes nothing"

    def add_earlier_gradient(self, adapter: Adapter) -> None:
        """To the scratch that holds this part's. Refuses the operation where the sum is not finite."""
        if self.progress.gradient is not None:
            adapter.scratch.add_(self.progress.gradient.to(adapter.scratch.device))
        if not adapter.scratch_is_finite():
            self.refuse(f"the gradient of {self.operation.loss_name} is not finite")

    def end(self, answer: Answer) -> None:
        self.done, self.answer = True, answer

    def suspend(self, adapter: Adapter) -> None:
        """More parts come; until then the scratch is free."""
        if not self.forward_only:
            self.progress.gradient = adapter.scratch.to("cpu", copy=True)
            adapter.abandon_operation()
        self._advance()

    def complete(self, adapter: Adapter) -> ForwardBackwardOutput:
        """It was the last part."""
        self._advance()
        totals = self.progress.totals
        if not self.forward_only:
            losses = {f"loss/{self.operation.loss_name}": totals.loss}
            adapter.commit(totals.num_tokens, totals.denominator, losses)
        return self.progress.output()

    def _advance(self) -> None:
        totals = Totals(num_tokens=self.operation.num_tokens, denominator=self.operation.denominator)
        for _, of_segment in sorted(self._totals.items()):
            totals.add(of_segment)
        self.progress.totals.add(totals)
        self.progress.logprobs += [array for array in self._logprobs if array is not None]
        num_data = self.operation.first_datum + len(self.operation.rows)
        assert len(self.progress.logprobs) == num_data, "a datum was in no micro-batch"


def _numpy(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()


def _sum(values: np.ndarray) -> float:
    return float(values.sum(dtype=np.float64))


def _not_finite(segment: MicroBatchSegment, scores: Scores, operation: Operation) -> str | None:
    """Which datum has a loss that is not finite. Log-probabilities may be infinite where nothing counts."""
    bad = ~np.isfinite(scores.losses) | np.isnan(scores.logprobs)
    if not bad.any():
        return None
    row = int(bad.nonzero()[0][0])
    sequence = int(np.searchsorted(segment.bounds, row, side="right")) - 1
    datum, position = operation.first_datum + segment.datums[sequence], row - segment.bounds[sequence]
    if np.isnan(scores.logprobs[row]).any():
        return (
            f"datum {datum}: the model's log-probability at position {position} is NaN: its weights have diverged;"
            " go on from an earlier checkpoint with a lower learning rate"
        )
    return (
        f"datum {datum}: the {operation.loss_name} loss at position {position} is not finite, the model's"
        f" log-probability is {scores.logprobs[row].tolist()}: check its advantages, weights and logprobs"
    )

"""The progress of an operation through one or several passes: the results of its finished parts, and the running
part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from ...schemas.training import FeatureLocation, ForwardBackwardOutput
from ..batch.micro_batch import MicroBatchSegment, split_by_datum
from ..batch.validated import ValidatedBatch
from ..drafts.sequences.captured_features import CapturedFeatures
from ..losses import Loss
from ..protocol.calls import Failure, OperationPart, RankOutput
from ..state.trainable import Trainable
from .scoring import ObjectiveScores

FEATURES = "features"
"""Key of a datum's output that holds the address of its features and their size in bytes."""

PartAnswer = ForwardBackwardOutput | RankOutput | Failure | None


@dataclass
class OperationTotals:
    """Sums over the finished part of an operation.

    loss, metrics: sums over positions.
    ratios, denominator: see LossOutput and Loss.denominator; for drafts, the ratios include acceptance lengths.
    """

    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    num_tokens: int = 0
    denominator: float = 0.0

    def add(self, other: "OperationTotals") -> None:
        self.loss += other.loss
        self.num_tokens += other.num_tokens
        self.denominator += other.denominator
        for name, value in other.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        for name, (numerator, denominator) in other.ratios.items():
            so_far = self.ratios.get(name, (0.0, 0.0))
            self.ratios[name] = so_far[0] + numerator, so_far[1] + denominator


@dataclass(eq=False)
class OperationProgress:
    """Holds the results of an operation's finished parts.

    loss: the operation's loss; its scores are the operation's output.
    num_data: data of the finished parts, on all ranks.
    scores, features: this rank's, by number of the datum. totals: of all ranks.
    gradient: the sum of the parts' gradients on this rank, float32 [P]; None before the first. It is in host memory
        because adapters leave the device between passes.
    has_warned: true if a warning about features that could not be stored was logged.
    """

    run_id: str
    loss: Loss
    num_data: int = 0
    scores: dict[int, np.ndarray] = field(default_factory=dict)
    features: dict[int, np.ndarray] = field(default_factory=dict)
    totals: OperationTotals = field(default_factory=OperationTotals)
    gradient: Tensor | None = None
    has_warned: bool = False

    def output(self) -> ForwardBackwardOutput:
        outputs = self.shared_output().outputs
        return ForwardBackwardOutput(tuple(outputs.values()), self._metrics())

    def shared_output(self) -> RankOutput:
        name = self.loss.scores
        outputs = {number: {name: each} for number, each in self.scores.items()}
        for number, each in self.features.items():
            outputs[number] = outputs.get(number, {}) | {FEATURES: each}
        return RankOutput(outputs, self._metrics())

    def _metrics(self) -> dict[str, float]:
        totals = self.totals
        means = {f"{name}:mean": value / max(totals.num_tokens, 1) for name, value in totals.metrics.items()}
        return {"loss:sum": totals.loss, "num_tokens:sum": float(totals.num_tokens)} | means | self._ratios()

    def _ratios(self) -> dict[str, float]:
        """Returns each ratio with its numerator and denominator; clients sum these to get the ratio over several
        operations."""
        found: dict[str, float] = {}
        for name, (numerator, denominator) in self.totals.ratios.items():
            found |= {f"{name}:mean": numerator / max(denominator, 1.0), f"{name}:sum": numerator}
            found[f"{name}/of:sum"] = denominator
        return found


@dataclass(frozen=True)
class TaskVerdict:
    """A rank's result of its share of a task.

    failure: why the task contributes nothing; None if it succeeded.
    """

    failure: Failure | None
    totals: OperationTotals


def merge_verdicts(verdicts: Sequence[TaskVerdict]) -> TaskVerdict:
    """Merges the ranks' verdicts, in rank order: a task that failed on one of them has failed on all."""
    failures = [verdict.failure for verdict in verdicts if verdict.failure is not None]
    totals = OperationTotals()
    for verdict in verdicts:
        totals.add(verdict.totals)
    return TaskVerdict(failures[0] if failures else None, totals)


@dataclass(frozen=True, eq=False)
class HostScores:
    """Holds ObjectiveScores in host memory: each array is float32 [n] or [n, K].

    ratios, denominator: over all n rows, see LossOutput.
    """

    scores: np.ndarray
    losses: np.ndarray
    metrics: dict[str, np.ndarray]
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    denominator: float = 0.0

    @staticmethod
    def of(scored: ObjectiveScores) -> "HostScores":
        metrics = {name: _numpy(values) for name, values in scored.loss.metrics.items()}
        return HostScores(_numpy(scored.scores), _numpy(scored.loss.losses), metrics)

    def of_rows(self, rows: slice) -> "HostScores":
        return HostScores(
            self.scores[rows], self.losses[rows], {name: each[rows] for name, each in self.metrics.items()}
        )


class Task:
    """Runs a part of an operation in a pass.

    failure: why the part contributes nothing; None so far.
    computed: true if nothing remains to be computed for it.
    feature_version: weight version of the features that it captures.
    """

    def __init__(
        self,
        part: OperationPart,
        operation: ValidatedBatch,
        progress: OperationProgress,
        stored: Mapping[int, CapturedFeatures] | None = None,
    ) -> None:
        """Starts the part. `stored` has the captured features of a draft's target, by row."""
        self.part = part
        self.operation = operation
        self.progress = progress
        self.stored = stored or {}
        self.computed = False
        self.feature_version = ""
        self.begin()

    @property
    def run_id(self) -> str:
        return self.part.request.model_id

    @property
    def forward_only(self) -> bool:
        return self.part.request.forward_only

    @property
    def capture_directory(self) -> Path | None:
        """The directory for features if the part only captures; else None."""
        place = self.part.request.features
        return Path(place.directory) if place is not None and place.captures else None

    @property
    def policy_capture(self) -> FeatureLocation | None:
        """The directory and layers of the features if a policy's part captures in addition to training; else None."""
        place = self.part.request.features
        return place if place is not None and place.algorithm is not None else None

    def begin(self) -> None:
        """Starts from the beginning and drops the results of an earlier attempt."""
        self.failure: Failure | None = None
        # By the first datum of each segment: lanes finish in any order, and float sums must not depend on it.
        self._totals: dict[int, OperationTotals] = {}
        self._scores: list[np.ndarray | None] = [None] * len(self.operation.rows)
        self._features: dict[int, np.ndarray | None] = {}

    def add_scores(self, segment: MicroBatchSegment, scores: HostScores) -> None:
        """Adds the scores of a segment. Refuses the operation if its loss is not finite."""
        if reason := _not_finite(segment, scores, self.operation):
            self.refuse(reason)
            return
        metrics = {name: _sum(values) for name, values in scores.metrics.items()}
        totals = OperationTotals(_sum(scores.losses), metrics, scores.ratios, denominator=scores.denominator)
        self._totals[segment.rows[0]] = totals
        for datum, of_datum in split_by_datum(segment, scores.scores, self.operation):
            self._scores[datum] = of_datum

    def record_features(self, row: int, features: CapturedFeatures | None) -> None:
        """Records that the row's features are stored; `features` is None if another rank reports their address."""
        told = None if features is None else f"{features.address} {features.num_bytes}".encode()
        self._features[row] = None if told is None else np.frombuffer(told, np.uint8)

    def refuse(self, reason: str) -> None:
        self.fail(Failure(f"{reason}; the operation contributes nothing", "user"))

    def fail(self, failure: Failure) -> None:
        self.failure = self.failure or failure

    def abandon(self, failure: Failure) -> None:
        self.failure, self.computed = failure, True

    def verdict(self) -> TaskVerdict:
        totals = OperationTotals(num_tokens=self.operation.num_tokens, denominator=self.operation.denominator)
        for _, of_segment in sorted(self._totals.items()):
            totals.add(of_segment)
        return TaskVerdict(self.failure, totals)

    def add_earlier_gradient(self, model: Trainable) -> None:
        """Adds the earlier parts' gradient to the scratch, which holds this part's.

        Refuses the operation if the sum is not finite.
        """
        if self.progress.gradient is not None:
            model.gradients.scratch.add_(self.progress.gradient.to(model.gradients.scratch.device))
        if not model.gradients.are_finite():
            self.refuse(f"the gradient of {self.operation.loss_name} is not finite")

    def suspend(self, model: Trainable, totals: OperationTotals) -> None:
        """Ends a part that is not the last: moves the gradient to the host, which frees the scratch until the next one.

        `totals` are those of all ranks, as in `complete`.
        """
        if not self.forward_only:
            self.progress.gradient = model.gradients.scratch.to("cpu", copy=True)
            model.gradients.abandon_operation()
        self._advance(totals)

    def complete(self, model: Trainable, totals: OperationTotals) -> PartAnswer:
        """Ends the last part: commits the gradient to the window and returns the operation's output."""
        self._advance(totals)
        whole = self.progress.totals
        if not self.forward_only:
            losses = {f"loss/{self.operation.loss_name}": whole.loss}
            model.gradients.commit(whole.num_tokens, whole.denominator, losses)
        return self.progress.shared_output() if self.part.shared else self.progress.output()

    def _advance(self, totals: OperationTotals) -> None:
        self.progress.totals.add(totals)
        self.progress.num_data += self.part.share.num_data
        for row, number in enumerate(self.operation.datum_indices):
            scores, features = self._scores[row], self._features.get(row)
            assert scores is not None or row in self._features, "a datum was missing from all micro-batches"
            if scores is not None:
                self.progress.scores[number] = scores
            if features is not None:
                self.progress.features[number] = features


def _numpy(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()


def _sum(values: np.ndarray) -> float:
    return float(values.sum(dtype=np.float64))


def _not_finite(segment: MicroBatchSegment, scores: HostScores, operation: ValidatedBatch) -> str | None:
    """Returns an error message that names the first datum whose loss is not finite, or None.

    Log-probabilities can be infinite at positions that do not count.
    """
    bad = ~np.isfinite(scores.losses) | np.isnan(scores.scores)
    if not bad.any():
        return None
    row = int(bad.nonzero()[0][0])
    sequence = int(np.searchsorted(segment.bounds, row, side="right")) - 1
    datum, position = operation.datum_indices[segment.rows[sequence]], row - segment.bounds[sequence]
    what = {"logprobs": "log-probability", "values": "value", "losses": "loss"}[operation.loss.scores]
    reads = ", ".join((*operation.loss.required, *operation.loss.optional))
    if np.isnan(scores.scores[row]).any():
        return (
            f"datum {datum}: the model's {what} at position {position} is NaN: its weights have diverged;"
            " continue from an earlier checkpoint with a lower learning rate"
        )
    return (
        f"datum {datum}: the {operation.loss_name} loss at position {position} is not finite, the model's"
        f" {what} is {scores.scores[row].tolist()}: check its {reads}"
    )

"""A part of an operation on this rank, what earlier parts left, and sums over segments, ranks and parts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from ...schemas.training import ForwardBackwardOutput
from ..batch.micro_batch import MicroBatchSegment, Objective, in_shape_of
from ..batch.validated import ValidatedBatch
from ..losses import LossOutput
from ..protocol.calls import Failure, OperationPart, PartAnswer, RankOutput
from ..state.trainable import Trainable
from ..state.vectors import BACKWARD_VECTORS, FORWARD_VECTORS


@dataclass
class PartialResult:
    """Sums over the data of a segment, of a rank's share, of a part on all ranks, or of all finished parts.

    failure: why the operation contributes nothing; None if all of it succeeded.
    loss, metrics: sums over positions.
    ratios, denominator: see LossOutput and ValidatedBatch; for drafts, the ratios include acceptance lengths.
    expert_counts: the tokens of each expert, integers [experts] for each sparse layer; empty if they are not counted.
    flops: the operations that the model needs for them, 0 if they are not counted.
    achieved, possible: operations of everything that ran together with them, and those that the devices could have done
    in that time; 0 if not measured.
    """

    failure: Failure | None = None
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    num_tokens: int = 0
    expert_counts: tuple[np.ndarray, ...] = ()
    denominator: float = 0.0
    flops: float = 0.0
    achieved: float = 0.0
    possible: float = 0.0

    def add(self, other: "PartialResult") -> None:
        """Adds other data of the operation; a failure of either is one of both."""
        self.failure = self.failure or other.failure
        self.loss += other.loss
        self.num_tokens += other.num_tokens
        self.denominator += other.denominator
        if other.expert_counts:
            self.expert_counts = _sum_counts((self.expert_counts, other.expert_counts))
        self.flops += other.flops
        self.achieved += other.achieved
        self.possible += other.possible
        for name, value in other.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        for name, (numerator, denominator) in other.ratios.items():
            so_far = self.ratios.get(name, (0.0, 0.0))
            self.ratios[name] = so_far[0] + numerator, so_far[1] + denominator

    def client_metrics(self) -> dict[str, float]:
        """Returns the metrics as clients get them.

        Ratios have a numerator and a denominator, too; clients sum these to get the ratio over several operations.
        """
        found = {"loss:sum": self.loss, "num_tokens:sum": float(self.num_tokens)}
        found |= {f"{name}:mean": value / max(self.num_tokens, 1) for name, value in self.metrics.items()}
        for name, (numerator, denominator) in self.ratios.items():
            found |= {f"{name}:mean": numerator / max(denominator, 1.0), f"{name}:sum": numerator}
            found[f"{name}/of:sum"] = denominator
        if self.flops:
            found["model_flops:sum"] = self.flops
        if self.possible:
            found["mfu:mean"] = self.achieved / self.possible
        return found | _expert_balance(self.expert_counts) if self.expert_counts else found


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """The result for n tokens, in host memory: each array is float32 in the shape of the targets, [n] or [n, K].

    start: the first of them in the micro-batch. scores: a head's. losses, metrics: see LossOutput. ratios, denominator:
    of drafts, over all n tokens.
    """

    start: int
    scores: np.ndarray
    losses: np.ndarray
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    denominator: float = 0.0

    @staticmethod
    def of(objective: Objective, scores: Tensor, output: LossOutput) -> "ScoredTokens":
        metrics = {name: values.cpu().numpy() for name, values in output.metrics.items()}
        return ScoredTokens(objective.start, scores.cpu().numpy(), output.losses.cpu().numpy(), metrics)


@dataclass(eq=False)
class FinishedParts:
    """The results of an operation's finished parts on this rank, while more parts follow.

    sums, num_data: of these parts on all ranks.
    outputs: this rank's, by index of the datum and by name.
    gradient: their sum on this rank, float32 [P]; None before the first. It is in host memory because adapters leave
    the device between passes.
    """

    run_id: str
    sums: PartialResult = field(default_factory=PartialResult)
    num_data: int = 0
    outputs: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    gradient: Tensor | None = None


class RankPart:
    """A part of an operation on this rank: what it is computed from, and its results so far.

    sent, batch: the part as it was sent, and its data; a part that is refused before it runs has no batch.
    model: the run's, whose tensors are usable while it is resident; missing if the run is not on this rank.
    token_budget: most tokens of a micro-batch of this part and those that can share one with it.
    finished: the parts before it.
    prepared: what its strategy has found for the part, see PassStrategy.read.
    vectors: those of its model that must be on the device.
    failure: why the part contributes nothing; None so far.
    flops: the operations that the model needs for this rank's share of the part.
    computed: true if nothing remains to be computed for the part.
    """

    batch: ValidatedBatch
    model: Trainable
    token_budget: int

    def __init__(self, sent: OperationPart, finished: FinishedParts | None = None) -> None:
        self.sent, self.run_id, self.forward_only = sent, sent.request.model_id, sent.request.forward_only
        self.vectors = FORWARD_VECTORS if self.forward_only else BACKWARD_VECTORS
        self.finished = finished or FinishedParts(self.run_id)
        self.prepared: Any = None
        self.computed = False
        self.flops = 0.0
        self.restart()

    def restart(self) -> None:
        """Drops what an earlier attempt at the part has computed."""
        self.failure: Failure | None = None
        # By the first example of each segment: lanes finish in any order, and float sums must not depend on it.
        self._segments: dict[int, PartialResult] = {}
        self._expert_counts: dict[int, tuple[np.ndarray, ...]] = {}

    def add_scores(self, segment: MicroBatchSegment, scored: ScoredTokens) -> None:
        """Adds the scores of a segment, which has some of the scored tokens. Refuses the operation if its loss is not
        finite."""
        own = slice(segment.start - scored.start, segment.stop - scored.start)
        scores, losses = scored.scores[own], scored.losses[own]
        # Log-probabilities can be infinite at positions that do not count.
        bad = ~np.isfinite(losses) | np.isnan(scores)
        if bad.any():
            self.refuse(_not_finite(segment, int(bad.nonzero()[0][0]), scores, self.batch))
            return
        self._segments[segment.examples[0]] = PartialResult(
            loss=float(losses.sum(dtype=np.float64)),
            metrics={name: float(values[own].sum(dtype=np.float64)) for name, values in scored.metrics.items()},
            ratios=scored.ratios,
            denominator=scored.denominator,
        )
        for example, (start, stop) in zip(segment.examples, pairwise(segment.bounds), strict=True):
            output = self.finished.outputs.setdefault(self.batch.datum_indices[example], {})
            output[self.batch.loss.head] = in_shape_of(self.batch.examples[example].targets, scores[start:stop])

    def add_expert_counts(self, segment: MicroBatchSegment, of_layers: tuple[np.ndarray, ...]) -> None:
        """Adds the tokens of each expert, for those of the segment's tokens that this rank has run."""
        self._expert_counts[segment.examples[0]] = of_layers

    def refuse(self, reason: str) -> None:
        self.fail(Failure(f"{reason}; the operation contributes nothing", "user"))

    def fail(self, failure: Failure) -> None:
        self.failure = self.failure or failure

    def abandon(self, failure: Failure) -> None:
        self.failure, self.computed = failure, True

    def add_earlier_gradient(self) -> None:
        """Adds the earlier parts' gradient to the scratch, which holds this part's.

        Refuses the operation if the sum is not finite.
        """
        gradients = self.model.gradients
        if self.finished.gradient is not None:
            gradients.scratch.add_(self.finished.gradient.to(gradients.scratch.device))
        if not gradients.are_finite():
            self.refuse(f"the gradient of {self.batch.loss_name} is not finite")

    def result(self, counts: bool) -> PartialResult:
        """Returns what this rank contributes to the part.

        Args:
            counts: false if another rank has run the same data and reports the sums, except those of experts: ranks
                along sp each route some of the tokens.
        """
        if self.failure is not None:
            return PartialResult(self.failure)
        result = PartialResult()
        if self._expert_counts:
            sums = _sum_counts(self._expert_counts.values())
            # In the smallest integer dtype that holds them: ranks send them to each other.
            result.expert_counts = tuple(layer.astype(np.min_scalar_type(layer.max())) for layer in sums)
        if counts:
            result.num_tokens, result.denominator = self.batch.num_tokens, self.batch.denominator
            result.flops = self.flops
            for _, of_segment in sorted(self._segments.items()):
                result.add(of_segment)
        return result

    def end_part(self, result: PartialResult) -> PartAnswer:
        """Ends a part that has succeeded on all ranks, with the sums of all of them.

        The last part commits the gradient to the window and returns the operation's output. An earlier one moves it to
        the host, which frees the scratch until the next part.
        """
        finished, gradients, scores = self.finished, self.model.gradients, self.batch.loss.head
        assert scores == "features" or all(scores in finished.outputs.get(i, ()) for i in self.batch.datum_indices), (
            "a datum was missing from all micro-batches"
        )
        finished.sums.add(result)
        finished.num_data += self.sent.data_share.num_data
        if not self.sent.last:
            if not self.forward_only:
                finished.gradient = gradients.scratch.to("cpu", copy=True)
                gradients.abandon_operation()
            return None
        if not self.forward_only:
            losses = {f"loss/{self.batch.loss_name}": finished.sums.loss}
            gradients.commit(finished.sums.num_tokens, finished.sums.denominator, losses)
        outputs, metrics = finished.outputs, finished.sums.client_metrics()
        if self.sent.rank_share:
            return RankOutput(outputs, metrics)
        return ForwardBackwardOutput(tuple(outputs[number] for number in sorted(outputs)), metrics)


def _not_finite(segment: MicroBatchSegment, token: int, scores: np.ndarray, batch: ValidatedBatch) -> str:
    """Returns an error message that names the datum of the segment's first token whose loss is not finite."""
    number = int(np.searchsorted(segment.bounds, token, side="right")) - 1
    datum, position = batch.datum_indices[segment.examples[number]], token - segment.bounds[number]
    what = {"logprobs": "log-probability", "values": "value", "losses": "loss"}[batch.loss.head]
    reads = ", ".join((*batch.loss.required, *batch.loss.optional))
    if np.isnan(scores[token]).any():
        return (
            f"datum {datum}: the model's {what} at position {position} is NaN: its weights have diverged;"
            " continue from an earlier checkpoint with a lower learning rate"
        )
    return (
        f"datum {datum}: the {batch.loss_name} loss at position {position} is not finite, the model's"
        f" {what} is {scores[token].tolist()}: check its {reads}"
    )


def _sum_counts(counts: Iterable[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Adds up counts of experts by layer, of which some may be empty, to int64."""
    given = [of_layers for of_layers in counts if of_layers]
    return tuple(np.stack(of_layer).sum(0, dtype=np.int64) for of_layer in zip(*given, strict=True))


def _expert_balance(counts: tuple[np.ndarray, ...]) -> dict[str, float]:
    """Returns the metrics of balance between experts, with the names and formulas of Tinker's SDK
    (tinker.types.ForwardBackwardOutput)."""
    loads = [of_layer * len(of_layer) / of_layer.sum() for of_layer in counts]  # 1 is an expert's even share
    most = [load.max() - 1 for load in loads]
    return {
        "e_frac_with_tokens:mean": float(np.mean([(load > 0).mean() for load in loads])),
        "e_frac_oversubscribed:mean": float(np.mean([(load > 1).mean() for load in loads])),
        "e_max_violation:mean": float(np.mean(most)),
        "e_max_violation:max": float(np.max(most)),
        "e_min_violation:mean": float(np.mean([load.min() - 1 for load in loads])),
    }

"""An operation on this rank through one or several passes: the running part, and the results of the finished ones."""

from typing import Any

import numpy as np
from torch import Tensor

from ...schemas.training import ForwardBackwardOutput
from ..batch.micro_batch import MicroBatchSegment, split_by_example
from ..batch.partial_result import PartialResult, narrowed, sum_counts
from ..batch.validated import ValidatedBatch
from ..protocol.calls import Failure, OperationPart, PartAnswer, RankOutput
from ..state.trainable import Trainable
from ..state.vectors import BACKWARD_VECTORS, FORWARD_VECTORS
from .scoring import ScoredTokens


class RankOperation:
    """Holds an operation's running part and the results of its finished parts.

    part, batch: the running part and its data; a part that is refused before it runs has no batch.
    prepared: what its strategy has found for the part, see PassStrategy.read.
    vectors: those of its model that must be on the device.
    failure: why the part contributes nothing; None so far.
    flops: the operations that the model needs for this rank's share of the running part.
    computed: true if nothing remains to be computed for the part.
    finished: the sums of the finished parts, on all ranks. num_data: their data, on all ranks.
    outputs: this rank's, by index of the datum and by name.
    gradient: the sum of the finished parts' gradients on this rank, float32 [P]; None before the first. It is in host
        memory because adapters leave the device between passes.
    """

    batch: ValidatedBatch

    def __init__(self, part: OperationPart) -> None:
        self.run_id, self.forward_only = part.request.model_id, part.request.forward_only
        self.vectors = FORWARD_VECTORS if self.forward_only else BACKWARD_VECTORS
        self.finished = PartialResult()
        self.num_data = 0
        self.outputs: dict[int, dict[str, np.ndarray]] = {}
        self.gradient: Tensor | None = None
        self.begin(part)

    def begin(self, part: OperationPart) -> None:
        """Begins the next part."""
        self.part = part
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
        """Adds the scores of a segment. Refuses the operation if its loss is not finite."""
        if reason := _not_finite(segment, scored, self.batch):
            self.refuse(reason)
            return
        metrics = {name: float(values.sum(dtype=np.float64)) for name, values in scored.metrics.items()}
        self._segments[segment.examples[0]] = PartialResult(
            loss=float(scored.losses.sum(dtype=np.float64)),
            metrics=metrics,
            ratios=scored.ratios,
            denominator=scored.denominator,
        )
        for example, scores in split_by_example(segment, scored.scores, self.batch):
            self.outputs.setdefault(self.batch.datum_indices[example], {})[self.batch.loss.scores] = scores

    def add_expert_counts(self, segment: MicroBatchSegment, of_layers: tuple[np.ndarray, ...]) -> None:
        """Adds the tokens of each expert, for those of the segment's tokens that this rank has run."""
        self._expert_counts[segment.examples[0]] = of_layers

    def refuse(self, reason: str) -> None:
        self.fail(Failure(f"{reason}; the operation contributes nothing", "user"))

    def fail(self, failure: Failure) -> None:
        self.failure = self.failure or failure

    def abandon(self, failure: Failure) -> None:
        self.failure, self.computed = failure, True

    def add_earlier_gradient(self, model: Trainable) -> None:
        """Adds the earlier parts' gradient to the scratch, which holds this part's.

        Refuses the operation if the sum is not finite.
        """
        if self.gradient is not None:
            model.gradients.scratch.add_(self.gradient.to(model.gradients.scratch.device))
        if not model.gradients.are_finite():
            self.refuse(f"the gradient of {self.batch.loss_name} is not finite")

    def result(self, counts: bool) -> PartialResult:
        """Returns what this rank contributes to the part.

        Args:
            counts: false if another rank has run the same data and reports the sums, except those of experts: ranks
                along sp each route some of the tokens.
        """
        result = PartialResult(self.failure)
        if self.failure is None and self._expert_counts:
            result.expert_counts = narrowed(sum_counts(self._expert_counts.values()))
        if counts and self.failure is None:
            result.num_tokens, result.denominator = self.batch.num_tokens, self.batch.denominator
            result.flops = self.flops
            for _, of_segment in sorted(self._segments.items()):
                result.add(of_segment)
        return result

    def end_part(self, model: Trainable, result: PartialResult) -> PartAnswer:
        """Ends a part that has succeeded on all ranks, with the sums of all of them.

        The last part commits the gradient to the window and returns the operation's output. An earlier one moves it to
        the host, which frees the scratch until the next part.
        """
        scores = self.batch.loss.scores
        assert scores == "features" or all(scores in self.outputs.get(i, ()) for i in self.batch.datum_indices), (
            "a datum was missing from all micro-batches"
        )
        self.finished.add(result)
        self.num_data += self.part.share.num_data
        if not self.part.last:
            if not self.forward_only:
                self.gradient = model.gradients.scratch.to("cpu", copy=True)
                model.gradients.abandon_operation()
            # The next part may take long to arrive, and these hold its data and open files.
            self.prepared = None
            del self.batch, self.part
            return None
        if not self.forward_only:
            losses = {f"loss/{self.batch.loss_name}": self.finished.loss}
            model.gradients.commit(self.finished.num_tokens, self.finished.denominator, losses)
        outputs, metrics = self.outputs, self.finished.client_metrics()
        if self.part.shared:
            return RankOutput(outputs, metrics)
        return ForwardBackwardOutput(tuple(outputs[number] for number in sorted(outputs)), metrics)


def _not_finite(segment: MicroBatchSegment, scored: ScoredTokens, batch: ValidatedBatch) -> str | None:
    """Returns an error message that names the first datum whose loss is not finite, or None.

    Log-probabilities can be infinite at positions that do not count.
    """
    bad = ~np.isfinite(scored.losses) | np.isnan(scored.scores)
    if not bad.any():
        return None
    token = int(bad.nonzero()[0][0])
    number = int(np.searchsorted(segment.bounds, token, side="right")) - 1
    datum, position = batch.datum_indices[segment.examples[number]], token - segment.bounds[number]
    what = {"logprobs": "log-probability", "values": "value", "losses": "loss"}[batch.loss.scores]
    reads = ", ".join((*batch.loss.required, *batch.loss.optional))
    if np.isnan(scored.scores[token]).any():
        return (
            f"datum {datum}: the model's {what} at position {position} is NaN: its weights have diverged;"
            " continue from an earlier checkpoint with a lower learning rate"
        )
    return (
        f"datum {datum}: the {batch.loss_name} loss at position {position} is not finite, the model's"
        f" {what} is {scored.scores[token].tolist()}: check its {reads}"
    )

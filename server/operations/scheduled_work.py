"""Evaluates and saves after optimizer steps of a run, as it is scheduled.

The work belongs to the step's operation, whose result reports it. After a crash before that result is stored, the step
and the work are repeated together; a repeated save finds that it was published.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ...schemas.batches import merge_outputs
from ...schemas.errors import OperationError
from ...schemas.schedules import CheckpointSchedule, StoredEvaluation
from ...schemas.training import ForwardBackwardOutput, ForwardBackwardRequest
from ...workers.protocol.calls import WorkerLost
from ..store import CheckpointRecord, RunRecord
from .context import OperationContext
from .saving import CheckpointSave

logger = logging.getLogger(__name__)

_STEP, _PREFIX, _METRIC = "step", "schedule", "metric"
"""Keys in the metadata of scheduled checkpoints: the step, the schedule's prefix and the value of its metric."""


@dataclass(frozen=True)
class AfterStep:
    """The results of the scheduled work after a step."""

    metrics: Mapping[str, float]
    warnings: Collection[str]


class ScheduledWork:
    """Does what is due after the optimizer step `step` of a run, whose operation has this seq_id."""

    def __init__(self, context: OperationContext, run: RunRecord, step: int, seq_id: int) -> None:
        self._context, self._run, self._step, self._seq_id = context, run, step, seq_id
        self._warnings: list[str] = []

    async def do(self, of_step: Mapping[str, float]) -> AfterStep:
        """Does the work. of_step: the step's metrics. Raises WorkerLost; other errors are warnings."""
        metrics, schedules = dict(of_step), self._run.schedules
        checkpoints = schedules.checkpoints
        saves = checkpoints is not None and self._step % checkpoints.every == 0
        for name, evaluation in schedules.evaluations.items():
            is_asked = saves and checkpoints is not None and (checkpoints.metric or "").startswith(_prefix(name))
            if is_asked or self._step % evaluation.every == 0:
                metrics |= await self._evaluate(name, evaluation)
        if saves and checkpoints is not None:
            metrics |= await self._save(checkpoints, metrics)
        return AfterStep({name: value for name, value in metrics.items() if name not in of_step}, self._warnings)

    async def _evaluate(self, name: str, evaluation: StoredEvaluation) -> Mapping[str, float]:
        outputs, weights = [], []
        try:
            async for piece in self._context.evaluation_data.read(self._run.run_id, evaluation.seq_id):
                outputs.append(_without_rows(await self._context.dispatch.forward_backward(piece)))
                weights.append(_weight(piece))
        except (OperationError, OSError, ValueError) as error:
            self._warn(f"evaluation {name}", error)
            return {}
        return _metrics(name, outputs, sum(weights))

    async def _save(self, schedule: CheckpointSchedule, metrics: Mapping[str, float]) -> Mapping[str, float]:
        value = None if schedule.metric is None else metrics.get(schedule.metric)
        metadata = {_PREFIX: schedule.prefix, _STEP: str(self._step)}
        if value is not None:
            metadata[_METRIC] = repr(value)
        elif schedule.metric is not None:
            self._warnings.append(f"step {self._step} has no metric {schedule.metric}: it is not one of the best")
        name = schedule.name_of(self._step)
        save = CheckpointSave("weights", name, schedule.ttl_seconds, metadata, overwrite=True)
        try:
            await save.publish(self._context, self._run, self._seq_id)
            for old in _superseded(await self._scheduled(schedule), schedule):
                await self._context.checkpoints.delete(old)
        except (OperationError, OSError) as error:
            self._warn(f"checkpoint {name}", error)
            return {}
        return {"checkpoint_step:last": float(self._step)}

    async def _scheduled(self, schedule: CheckpointSchedule) -> list[CheckpointRecord]:
        """Returns the checkpoints of this schedule, the newest step first; without those that are published."""
        now = self._context.checkpoints.now()
        records = await self._context.store.checkpoints.list_of_runs([self._run.run_id], now)
        own = [one for one in records if _metadata(one).get(_PREFIX) == schedule.prefix and not one.public]
        return sorted(own, key=lambda one: -int(_metadata(one)[_STEP]))

    def _warn(self, what: str, error: Exception) -> None:
        """Records the failure. Raises the error if the worker was lost, since all is repeated then."""
        if isinstance(error, WorkerLost):
            raise error
        logger.warning("%s, step %d: %s failed: %s", self._run.run_id, self._step, what, error)
        shown = error if isinstance(error, OperationError) else "the server's log says why"
        self._warnings.append(f"{what} after step {self._step} failed: {shown}")


def _superseded(newest_first: list[CheckpointRecord], schedule: CheckpointSchedule) -> list[CheckpointRecord]:
    measured = [one for one in newest_first if _METRIC in _metadata(one)]
    sign = 1 if schedule.best == "min" else -1
    best = sorted(measured, key=lambda one: sign * float(_metadata(one)[_METRIC]))[: schedule.keep_best]
    return [one for one in newest_first[schedule.keep_last :] if one not in best]


def _metadata(checkpoint: CheckpointRecord) -> Mapping[str, str]:
    return checkpoint.user_metadata or {}


def _prefix(name: str) -> str:
    return f"evaluation/{name}/"


def evaluation_metrics(
    name: str, outputs: Sequence[ForwardBackwardOutput], requests: Sequence[ForwardBackwardRequest]
) -> dict[str, float]:
    """Returns the metrics of an evaluation, given the requests for the pieces of its data and their outputs."""
    return _metrics(name, outputs, sum(map(_weight, requests)))


def _metrics(name: str, outputs: Sequence[ForwardBackwardOutput], weight: float) -> dict[str, float]:
    """Returns the metrics of an evaluation; `loss:mean` is the summed loss divided by the summed weights."""
    metrics = dict(merge_outputs(outputs).metrics)
    if weight > 0:
        metrics.setdefault("loss:mean", metrics["loss:sum"] / weight)
    return {f"{_prefix(name)}{metric}": value for metric, value in metrics.items()}


def _weight(request: ForwardBackwardRequest) -> float:
    """Returns the sum of the weights of the data, or their number of tokens if they have none."""
    inputs = [datum.loss_fn_inputs for datum in request.data]
    return sum(
        float(each["weights"].sum()) if "weights" in each else float(len(datum.tokens))
        for datum, each in zip(request.data, inputs, strict=True)
    )


def _without_rows(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
    return replace(output, loss_fn_outputs=({},) * len(output.loss_fn_outputs))

"""Evaluates and saves after optimizer steps of a run, as it is scheduled.

The work belongs to the step's operation, whose result reports it. If the workers or the server crash before that result
is stored, the step and the work are repeated together; a repeated save finds that it was published.
"""

import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...schemas.batches import merge_outputs
from ...schemas.errors import OperationError, RequestError
from ...schemas.schedules import METRIC_KEY, STEP_KEY, CheckpointSchedule, StoredEvaluation
from ...schemas.training import ForwardBackwardOutput, ForwardBackwardRequest
from ...workers.protocol.calls import WorkerLost
from ..store import CheckpointRecord, RunRecord
from ..store.database.database_errors import OUTAGE_ERRORS
from ..tenants.quotas import Reservation
from .context import OperationContext
from .saving import CheckpointSave

logger = logging.getLogger(__name__)

_OF_PASSES = ("model_flops:sum", "mfu:mean")
"""Metrics that say how passes ran, which is no result of an evaluation."""


@dataclass
class ScheduledWork:
    """The work that is due after the optimizer step `step` of a run, whose operation has this seq_id.

    metrics: of the step, to which those of the work are added. warnings: to which what failed is added. reservation: of
    the operation, which pays for evaluated tokens; None if no client waits for it.
    """

    context: OperationContext
    run: RunRecord
    step: int
    seq_id: int
    reservation: Reservation | None
    metrics: dict[str, float]
    warnings: list[str]
    _num_pieces: int = 0

    async def run_all(self) -> None:
        """Does the work. Raises WorkerLost and OUTAGE_ERRORS, after which it is repeated; other errors are warnings,
        since the step was taken."""
        schedule = self.run.schedules.checkpoints
        due = schedule if schedule is not None and self.step % schedule.every == 0 else None
        measured = (due.metric or "") if due is not None else ""
        with self.context.sessions.kept_open(self.run.session_id):
            for name, evaluation in self.run.schedules.evaluations.items():
                if self.step % evaluation.every == 0 or measured.startswith(_prefix(name)):
                    await self._evaluate(name, evaluation)
            if due is not None:
                await self._save(due)

    async def _evaluate(self, name: str, evaluation: StoredEvaluation) -> None:
        try:
            outputs, weight = [], 0.0
            async for piece in self._pieces(evaluation):
                self._num_pieces += 1
                position = position_of(self.seq_id, self._num_pieces)
                output = await self.context.dispatch.forward_backward(piece, position=position)
                outputs.append(without_rows(output))
                weight += piece.total_weight
            found = evaluation_metrics(name, outputs, weight)
        except (WorkerLost, *OUTAGE_ERRORS):
            raise
        except Exception as error:
            self._warn(f"evaluation {name}", error)
            return
        self.metrics |= {metric: value for metric, value in found.items() if math.isfinite(value)}
        if infinite := [metric for metric, value in found.items() if not math.isfinite(value)]:
            self.warnings.append(f"{infinite[0]} after step {self.step} is {found[infinite[0]]}")

    async def _pieces(self, evaluation: StoredEvaluation) -> AsyncIterator[ForwardBackwardRequest]:
        async for piece in self.context.evaluation_data.read(self.run.run_id, evaluation.seq_id):
            if not self.context.sessions.is_open(self.run.session_id):
                raise OperationError(f"session {self.run.session_id} has ended")
            if self.reservation is not None:
                self.reservation.charge(sum(len(datum.tokens) for datum in piece.data))
            yield replace(piece, seq_id=self.seq_id)

    async def _save(self, schedule: CheckpointSchedule) -> None:
        name, metadata = schedule.name_of(self.step), {STEP_KEY: str(self.step)}
        if schedule.metric is not None:
            value = self.metrics.get(schedule.metric, math.nan)
            if not math.isfinite(value):
                self.warnings.append(f"step {self.step} has no metric {schedule.metric}: it is not one of the best")
            else:
                metadata[METRIC_KEY] = repr(value)
        try:
            saved = await self._publish(name, CheckpointSave("weights", name, schedule.ttl_seconds, metadata, True))
        except (WorkerLost, *OUTAGE_ERRORS):
            raise
        except Exception as error:
            self._warn(f"checkpoint {name}", error)
            return
        if not saved:
            self.warnings.append(f"checkpoint {name} exists, and was not saved by this schedule: it is kept as it is")
            return
        self.metrics["checkpoint_step:last"] = float(self.step)
        try:
            await self._delete_superseded(schedule, name)
        except OUTAGE_ERRORS:
            raise
        except Exception as error:
            self._warn(f"deleting checkpoints before {name}", error)

    async def _publish(self, name: str, save: CheckpointSave) -> bool:
        """Saves the checkpoint, unless there is one of this name that is public or that no schedule saved."""
        known = await self.context.store.checkpoints.get(self.run.run_id, "weights", name)
        if known is not None and (known.public or not _is_scheduled(known)):
            return False
        await save.publish(self.context, self.run, self.seq_id)
        return True

    async def _delete_superseded(self, schedule: CheckpointSchedule, newest: str) -> None:
        now = self.context.checkpoints.now()
        records = await self.context.store.checkpoints.list_of_runs([self.run.run_id], now)
        own = [one for one in reversed(records) if _is_scheduled(one) and one.name == schedule.name_of(_step_of(one))]
        kept = [newest, *(one.name for one in own if one.name != newest)][: schedule.keep_last]
        kept += [one.name for one in _best(own, schedule)]
        for one in own:
            if one.name not in kept and not one.public:
                await self.context.checkpoints.delete(one)

    def _warn(self, what: str, error: Exception) -> None:
        if isinstance(error, OperationError | RequestError):
            logger.warning("%s, step %d: %s failed: %s", self.run.run_id, self.step, what, error.message)
            shown = error.message
        else:
            logger.error("%s, step %d: %s failed", self.run.run_id, self.step, what, exc_info=error)
            shown = "the server's log says why"
        self.warnings.append(f"{what} after step {self.step} failed: {shown}")


def _best(scheduled: Sequence[CheckpointRecord], schedule: CheckpointSchedule) -> list[CheckpointRecord]:
    values = {one.name: float(_metadata(one)[METRIC_KEY]) for one in scheduled if METRIC_KEY in _metadata(one)}
    sign = 1 if schedule.best == "min" else -1
    measured = [one for one in scheduled if one.name in values]
    return sorted(measured, key=lambda one: sign * values[one.name])[: schedule.keep_best]


def _is_scheduled(checkpoint: CheckpointRecord) -> bool:
    return checkpoint.kind == "weights" and STEP_KEY in _metadata(checkpoint)


def _step_of(scheduled: CheckpointRecord) -> int:
    return int(_metadata(scheduled)[STEP_KEY])


def _metadata(checkpoint: CheckpointRecord) -> Mapping[str, str]:
    return checkpoint.user_metadata or {}


def _prefix(name: str) -> str:
    return f"evaluation/{name}/"


def position_of(seq_id: int, piece: int) -> float:
    """Returns the position of an evaluated piece, counted from 1, between its operation and the next one of the run.

    Without it, the step or an earlier piece would clear the run of a crash in this one (see Suspects).
    """
    return seq_id + piece / (piece + 1)


def evaluation_metrics(name: str, outputs: Sequence[ForwardBackwardOutput], weight: float) -> dict[str, float]:
    """Returns the metrics of an evaluation; `loss:mean` is the summed loss divided by the weight of all data."""
    metrics = dict(merge_outputs(outputs).metrics)
    if weight > 0:
        metrics.setdefault("loss:mean", metrics["loss:sum"] / weight)
    return {f"{_prefix(name)}{metric}": value for metric, value in metrics.items() if metric not in _OF_PASSES}


def without_rows(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
    """Returns the output without what it has for each datum."""
    return replace(output, loss_fn_outputs=({},) * len(output.loss_fn_outputs))

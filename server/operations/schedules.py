"""Operations that set what the server does after optimizer steps of a run: evaluations, and saving checkpoints."""

from dataclasses import dataclass, replace

from ...schemas.batches import num_bytes
from ...schemas.errors import OperationError
from ...schemas.schedules import (
    MAX_EVALUATIONS,
    CreateEvaluationResponse,
    DeleteEvaluationRequest,
    DeleteEvaluationResponse,
    RunSchedules,
    ScheduleCheckpointsRequest,
    ScheduleCheckpointsResponse,
    StoredEvaluation,
)
from ..journal.futures import Result
from ..logs.repeated_errors import refusing_full_disk
from ..store import RunRecord
from .context import OperationContext
from .evaluation_data import pieces_of
from .operation import Operation, json_result
from .scheduled_work import evaluation_metrics
from .training import Forward


@dataclass(eq=False)
class CreateEvaluation(Forward):
    """Evaluates now, and after every so many steps from now on; replaces an evaluation of the same name."""

    kind = "create_evaluation"
    changes_record = True

    @property
    def is_chained(self) -> bool:
        return False

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        request, schedule, data = self.request, self.request.evaluation, context.evaluation_data
        assert schedule is not None
        if request.capture_for is not None or any(datum.feature_ref is not None for datum in request.data):
            raise OperationError("an evaluation cannot use or capture features: leave out capture_for and feature_ref")
        evaluations = dict(run.schedules.evaluations)
        replaced, size = evaluations.get(schedule.name), sum(map(num_bytes, request.data))
        if replaced is None and len(evaluations) >= MAX_EVALUATIONS:
            raise OperationError(
                f"the run has {len(evaluations)} evaluations, which is the most: delete_evaluation of one of them first"
            )
        more_bytes = size - (0 if replaced is None else replaced.num_bytes)
        data.check_space(run, more_bytes)
        pieces = pieces_of(replace(request, seq_id=self.seq_id))
        outputs = [await context.dispatch.forward_backward(piece) for piece in pieces]
        with refusing_full_disk("the evaluation was"):
            await data.store(run.run_id, self.seq_id, request)
        evaluations[schedule.name] = StoredEvaluation(every=schedule.every, seq_id=self.seq_id, num_bytes=size)
        await _store(context, run, run.schedules.model_copy(update={"evaluations": evaluations}))
        data.count(run, more_bytes)
        if replaced is not None and replaced.seq_id != self.seq_id:
            await data.remove(run.run_id, replaced.seq_id)
        metrics = evaluation_metrics(schedule.name, outputs, pieces)
        response = CreateEvaluationResponse(
            name=schedule.name, every=schedule.every, num_tokens=self.num_tokens, metrics=metrics
        )
        return json_result(response)

    async def undo(self, context: OperationContext, run: RunRecord, error: Exception) -> None:
        await super().undo(context, run, error)
        await context.evaluation_data.remove(run.run_id, self.seq_id)


@dataclass(eq=False)
class DeleteEvaluation(Operation):
    kind = "delete_evaluation"
    changes_record = True
    request: DeleteEvaluationRequest

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        evaluations, name = dict(run.schedules.evaluations), self.request.name
        deleted = evaluations.pop(name, None)
        await _store(context, run, run.schedules.model_copy(update={"evaluations": evaluations}))
        if deleted is not None:
            context.evaluation_data.count(run, -deleted.num_bytes)
            await context.evaluation_data.remove(run.run_id, deleted.seq_id)
        return json_result(DeleteEvaluationResponse(name=name))


@dataclass(eq=False)
class ScheduleCheckpoints(Operation):
    kind = "schedule_checkpoints"
    changes_record = True
    request: ScheduleCheckpointsRequest

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        checkpoints = self.request.checkpoints
        if run.role == "reference":
            raise OperationError("a reference is not trained: schedule the checkpoints of another model")
        if checkpoints is not None and checkpoints.keep_best and checkpoints.metric is None:
            raise OperationError("keep_best needs a metric, such as evaluation/NAME/loss:mean: send one")
        await _store(context, run, run.schedules.model_copy(update={"checkpoints": checkpoints}))
        return json_result(ScheduleCheckpointsResponse(checkpoints=checkpoints))


async def _store(context: OperationContext, run: RunRecord, schedules: RunSchedules) -> None:
    await context.store.runs.set_schedules(run.run_id, schedules)

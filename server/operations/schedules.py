"""Operations that set what the server does after optimizer steps of a run: evaluations, and saving checkpoints."""

from collections.abc import Mapping
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
from .scheduled_work import evaluation_metrics, position_of, without_rows
from .training import Forward


@dataclass(eq=False)
class CreateEvaluation(Forward):
    """Evaluates now, and after every so many steps from now on; replaces an evaluation of the same name."""

    kind = "create_evaluation"
    changes_record = True

    @property
    def is_chained(self) -> bool:
        return False

    def check(self, run: RunRecord) -> None:
        super().check(run)
        request, evaluations = self.request, run.schedules.evaluations
        assert request.evaluation is not None
        if run.role == "reference":
            raise OperationError(
                "an evaluation follows optimizer steps, and a reference takes none: use forward for its losses, or "
                "create the evaluation on the model that is trained"
            )
        if request.capture_for is not None or any(datum.feature_ref is not None for datum in request.data):
            raise OperationError("an evaluation cannot use or capture features: leave out capture_for and feature_ref")
        if request.reads_recordings:
            raise OperationError(f"{request.loss_fn} reads what a sampler recorded: evaluate another loss")
        if request.evaluation.name not in evaluations and len(evaluations) >= MAX_EVALUATIONS:
            raise OperationError(
                f"the run has {len(evaluations)} evaluations, which is the most: delete_evaluation of one of them first"
            )

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        schedule, data = self.request.evaluation, context.evaluation_data
        assert schedule is not None
        replaced = run.schedules.evaluations.get(schedule.name)
        created = StoredEvaluation(
            every=schedule.every, seq_id=self.seq_id, num_bytes=sum(map(num_bytes, self.request.data))
        )
        schedules = _with_evaluations(run, {**run.schedules.evaluations, schedule.name: created})
        data.reserve(run, schedules.num_bytes)
        pieces = pieces_of(replace(self.request, seq_id=self.seq_id))
        outputs = []
        for number, piece in enumerate(pieces, 1):
            position = position_of(self.seq_id, number)
            output = await context.dispatch.forward_backward(piece, self.mark_begun, position)
            outputs.append(without_rows(output))
        with refusing_full_disk("the evaluation was"):
            await data.store(run.run_id, self.seq_id, self.request)
        await context.store.runs.set_schedules(run.run_id, schedules)
        if replaced is not None and replaced.seq_id != self.seq_id:
            await data.remove(run.run_id, replaced.seq_id)
        metrics = evaluation_metrics(schedule.name, outputs, sum(piece.total_weight for piece in pieces))
        response = CreateEvaluationResponse(
            name=schedule.name, every=schedule.every, num_tokens=self.num_tokens, metrics=metrics
        )
        return json_result(response)

    async def undo(self, context: OperationContext, run: RunRecord, error: Exception) -> None:
        await super().undo(context, run, error)
        stored = await context.stored_record(run)
        context.evaluation_data.count(run, stored.schedules.num_bytes)
        if self.seq_id not in {each.seq_id for each in stored.schedules.evaluations.values()}:
            await context.evaluation_data.remove(run.run_id, self.seq_id)


@dataclass(eq=False)
class DeleteEvaluation(Operation):
    kind = "delete_evaluation"
    changes_record = True
    request: DeleteEvaluationRequest

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        name, kept = self.request.name, dict(run.schedules.evaluations)
        deleted = kept.pop(name, None)
        schedules = _with_evaluations(run, kept)
        await context.store.runs.set_schedules(run.run_id, schedules)
        context.evaluation_data.count(run, schedules.num_bytes)
        if deleted is not None:
            await context.evaluation_data.remove(run.run_id, deleted.seq_id)
        return json_result(DeleteEvaluationResponse(name=name))


@dataclass(eq=False)
class ScheduleCheckpoints(Operation):
    kind = "schedule_checkpoints"
    changes_record = True
    request: ScheduleCheckpointsRequest

    def check(self, run: RunRecord) -> None:
        if run.role == "reference":
            raise OperationError("a reference is not trained: schedule the checkpoints of another model")

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        checkpoints = self.request.checkpoints
        schedules = run.schedules.model_copy(update={"checkpoints": checkpoints})
        await context.store.runs.set_schedules(run.run_id, schedules)
        return json_result(ScheduleCheckpointsResponse(checkpoints=checkpoints))


def _with_evaluations(run: RunRecord, evaluations: Mapping[str, StoredEvaluation]) -> RunSchedules:
    return run.schedules.model_copy(update={"evaluations": evaluations})

"""Messages about a run's schedules: the checkpoints and evaluations that follow its optimizer steps."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from .bounds import Id, TtlSeconds
from .training import Natural, Positive, Request, SeqId, Strict, Wire

SCHEDULE_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Names of evaluations and of scheduled checkpoints."""

ScheduleName = Annotated[str, Field(max_length=64, pattern=f"^{SCHEDULE_NAME}$")]

CHECKPOINTS_KEY = "trainhouse.checkpoints"
"""The key under which a model's user_metadata may have a CheckpointSchedule, as JSON, when it is created."""

STEP_KEY, METRIC_KEY = "trainhouse.step", "trainhouse.metric"
"""Keys in the metadata of scheduled checkpoints, which clients cannot use: the step, and the value of the metric."""

MAX_EVALUATIONS = 16
"""The most evaluations of a run."""


class CheckpointSchedule(Strict):
    """Saves a checkpoint after every `every`-th optimizer step, named PREFIX-000100 after 100 steps.

    keep_last: how many of the newest are kept. keep_best: how many of those with the best `metric` are kept in
    addition; it is a metric of the step, such as that of an evaluation, evaluation/NAME/loss:mean. best: whether lower
    or higher values are better.
    """

    synonyms: ClassVar[Mapping[str, str]] = {"keep": "keep_last", "mode": "best", "steps": "every", "name": "prefix"}

    every: Positive
    keep_last: Annotated[int, Field(ge=1, le=1000)] = 3
    keep_best: Annotated[int, Field(ge=0, le=1000)] = 0
    metric: Id | None = None
    best: Literal["min", "max"] = "min"
    prefix: ScheduleName = "step"
    ttl_seconds: TtlSeconds | None = None

    @model_validator(mode="after")
    def _best_need_a_metric(self) -> Self:
        if self.keep_best and self.metric is None:
            raise PydanticCustomError("no_metric", "keep_best needs a metric, such as evaluation/NAME/loss:mean")
        return self

    def name_of(self, step: int) -> str:
        return f"{self.prefix}-{step:06d}"


class StoredEvaluation(Wire):
    """An evaluation after every `every`-th optimizer step; seq_id: of the operation that created it. num_bytes: of its
    data."""

    every: Positive
    seq_id: Positive
    num_bytes: Natural


class RunSchedules(Wire):
    """The schedules of a run. evaluations: by name."""

    checkpoints: CheckpointSchedule | None = None
    evaluations: Mapping[str, StoredEvaluation] = {}

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the data of all evaluations."""
        return sum(evaluation.num_bytes for evaluation in self.evaluations.values())

    def is_due_within(self, first: int, last: int) -> bool:
        """True if a schedule is due after one of the steps from `first` to `last`."""
        intervals = [each.every for each in (self.checkpoints, *self.evaluations.values()) if each is not None]
        return any(last // every > (first - 1) // every for every in intervals)


NO_SCHEDULES = RunSchedules()


class ScheduleCheckpointsRequest(Request):
    """Saves checkpoints after optimizer steps from now on; `checkpoints` null ends that."""

    model_id: Id
    seq_id: SeqId = 0
    checkpoints: CheckpointSchedule | None = None
    type: Literal["schedule_checkpoints"] = "schedule_checkpoints"


class ScheduleCheckpointsResponse(Wire):
    checkpoints: CheckpointSchedule | None = None
    type: Literal["schedule_checkpoints"] = "schedule_checkpoints"


class CreateEvaluationResponse(Wire):
    """metrics: of the evaluation now, before the next step."""

    name: str
    every: int
    num_tokens: int
    metrics: Mapping[str, float]
    type: Literal["create_evaluation"] = "create_evaluation"


class DeleteEvaluationRequest(Request):
    """Ends an evaluation and deletes its data."""

    model_id: Id
    name: ScheduleName
    seq_id: SeqId = 0
    type: Literal["delete_evaluation"] = "delete_evaluation"


class DeleteEvaluationResponse(Wire):
    name: str
    type: Literal["delete_evaluation"] = "delete_evaluation"

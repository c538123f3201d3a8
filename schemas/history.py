"""Messages about what a run has done: its operations, the metrics of its steps, and those that its client logs."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .bounds import FirstErrorOnly, first_error_only
from .training import Strict, Wire

MAX_STEP = 2**53
"""The highest step that a client can name: every JSON parser reads numbers up to it."""

MAX_LOGGED_METRICS = 64
"""The most metrics of an entry."""

MetricName = Annotated[str, Field(min_length=1, max_length=128)]
LoggedValues = Annotated[
    dict[MetricName, Annotated[float, Field(allow_inf_nan=False)]],
    Field(max_length=MAX_LOGGED_METRICS),
    first_error_only(MAX_LOGGED_METRICS),
]


class LoggedMetrics(Strict):
    """Metrics of the client's own for one step, such as reward and KL. A later entry for the step adds to them, and
    replaces those of the same name."""

    synonyms: ClassVar[Mapping[str, str]] = {"values": "metrics", "global_step": "step"}

    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    metrics: LoggedValues


class LogMetricsRequest(Strict):
    entries: Annotated[list[LoggedMetrics], Field(min_length=1, max_length=1000), FirstErrorOnly()]


class LogMetricsResponse(Wire):
    type: Literal["log_metrics"] = "log_metrics"


class MetricSeries(Wire):
    """Metrics by step: each list of `metrics` has a value per step, null where the step has none.

    steps: as the optimizer counts them, or as the client has named them. They may begin again lower after
        load_weights.
    times: when each step ended, or was last logged, in seconds since 1970.
    next: pass it as `after` for the steps that follow; null if these are the last.
    last: pass it as `after` for what follows these steps, also if that is yet to be; null if there are none.
    """

    steps: list[int]
    times: list[float]
    metrics: dict[str, list[float | None]]
    next: int | None
    last: int | None = None


class RunMetrics(Wire):
    """training: of optimizer steps, with the passes before each. logged: by the client."""

    training: MetricSeries
    logged: MetricSeries


class RunOperation(Wire):
    """An operation of a run that has ended; see OperationRecord for its fields."""

    seq_id: int
    kind: str
    ended_at: datetime
    queued_seconds: float
    busy_seconds: float
    num_tokens: int
    step: int | None = None
    error: str | None = None
    metrics: dict[str, float]


class RunOperationList(Wire):
    """Operations of a run, the last first; next: pass it as `before` for those before them, null if there are none."""

    operations: list[RunOperation]
    next: int | None = None

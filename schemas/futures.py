"""Futures: the answer to a submit, and polling for the result."""

from typing import Literal

from .errors import Category
from .training import Wire

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class SubmitResponse(Wire):
    """seq_id (ours): the number that the operation has, for who left it out."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    seq_id: int | None = None


class RetrieveFutureRequest(Wire):
    request_id: str
    allow_metadata_only: bool = False


class CancelFutureRequest(Wire):
    request_id: str


class RequestFailed(Wire):
    error: str
    category: Category


class Pending(Wire):
    """Body of the 408 that ends a long poll without a result."""

    queue_state: QueueState = "active"
    queue_state_reason: str | None = None

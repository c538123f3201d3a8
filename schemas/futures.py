"""Futures: the answer to a submit, and polling for the result."""

from typing import Annotated, Literal

from pydantic import Field

from .bounds import FirstOnly, Id
from .errors import Category
from .training import Natural, Wire

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class SubmitResponse(Wire):
    """seq_id (ours): the number that the operation has, for who left it out."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    seq_id: int | None = None


class RetrieveFutureRequest(Wire):
    request_id: Id
    allow_metadata_only: bool = False


class CancelFutureRequest(Wire):
    request_id: Id


class SamplingSessionTarget(Wire):
    """One client of a sampling session: the original (0) or a clone, whose seq_ids start at a billion times this."""

    sampling_session_id: Id
    cloned_sampler_id: Natural = 0
    type: Literal["sampling_session"] = "sampling_session"


class RetrieveFuturesRequest(Wire):
    """prev_cursor: of the last answer, 0 at first. timeout: seconds to wait when nothing is new; 0 = not at all."""

    target: SamplingSessionTarget
    prev_cursor: Natural = 0
    timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    retrieved_request_ids: Annotated[tuple[Id, ...], Field(max_length=1 << 16), FirstOnly()] = ()


class FutureCompletion(Wire):
    """response_payload_uncompressed_size: bytes of a finished one's result."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class RetrieveFuturesResponse(Wire):
    completions: tuple[FutureCompletion, ...]
    cursor: int


class RequestFailed(Wire):
    error: str
    category: Category


class Pending(Wire):
    """Body of the 408 that ends a long poll without a result."""

    queue_state: QueueState = "active"
    queue_state_reason: str | None = None

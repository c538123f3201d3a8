"""Messages about futures: the response to a submitted request, and polling for the result."""

from typing import Annotated, Literal

from pydantic import Field

from .bounds import FirstErrorOnly, Id
from .errors import Category
from .training import Natural, Request, Wire

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class SubmitResponse(Wire):
    """Acknowledges a request. seq_id (ours): the operation's number, for clients that left it out."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    seq_id: int | None = None


class RetrieveFutureRequest(Request):
    request_id: Id
    allow_metadata_only: bool = False


class CancelFutureRequest(Request):
    request_id: Id


class SamplingSessionTarget(Request):
    """Names one client of a sampling session.

    cloned_sampler_id: 0 for the original; the seq_ids of a clone start at a billion times this number.
    """

    sampling_session_id: Id
    cloned_sampler_id: Natural = 0
    type: Literal["sampling_session"] = "sampling_session"


class RetrieveFuturesRequest(Request):
    """Requests the futures that completed since the last call.

    prev_cursor: the cursor of the last response, 0 at first. timeout: seconds to wait if there is nothing new; 0
    returns at once.
    """

    target: SamplingSessionTarget
    prev_cursor: Natural = 0
    timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    retrieved_request_ids: Annotated[tuple[Id, ...], Field(max_length=1 << 16), FirstErrorOnly()] = ()


class FutureCompletion(Wire):
    """Reports a completed future. response_payload_uncompressed_size: the size of its result in bytes, if finished."""

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
    """The body of the 408 response that ends a long poll without a result."""

    queue_state: QueueState = "active"
    queue_state_reason: str | None = None

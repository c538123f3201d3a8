"""Decodes requests by their kind: operations as they arrive, and journaled entries."""

import asyncio
import json
from collections.abc import Callable
from functools import partial

from pydantic import BaseModel

from ...schemas.checkpoints import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from ...schemas.codec import JsonObject, decode_model, decompress
from ...schemas.drafts import BuildVocabMapRequest, CaptureRequest, SetTargetRequest
from ...schemas.errors import RequestError
from ...schemas.models import CreateModelRequest
from ...schemas.sampling import SampleRequest
from ...schemas.schedules import DeleteEvaluationRequest, ScheduleCheckpointsRequest
from ...schemas.training import ForwardBackwardRequest, OptimStepRequest
from ..http.bodies import (
    UNLIMITED,
    ReceivedBody,
    decode_body,
    forward_backward_decoder,
    ignoring_unknown,
    json_decoder,
)
from .journal import JournalEntry

JsonRequest = (
    OptimStepRequest
    | SaveWeightsRequest
    | SaveWeightsForSamplerRequest
    | SaveWeightsExternalRequest
    | SetTargetRequest
    | BuildVocabMapRequest
    | CaptureRequest
    | ScheduleCheckpointsRequest
    | DeleteEvaluationRequest
)
RunRequest = ForwardBackwardRequest | JsonRequest
"""Operations of a live run that are performed as the client sent them."""

_OPERATIONS: dict[str, type[JsonRequest]] = {
    "optim_step": OptimStepRequest,
    "save_weights": SaveWeightsRequest,
    "save_weights_for_sampler": SaveWeightsForSamplerRequest,
    "save_weights_external": SaveWeightsExternalRequest,
    "set_target": SetTargetRequest,
    "build_vocab_map": BuildVocabMapRequest,
    "capture": CaptureRequest,
    "schedule_checkpoints": ScheduleCheckpointsRequest,
    "delete_evaluation": DeleteEvaluationRequest,
}
_JSON: dict[str, type[BaseModel]] = {
    **_OPERATIONS,
    "load_weights": LoadWeightsRequest,
    "create_model": CreateModelRequest,
    "create_model_from_checkpoint": LoadWeightsRequest,
    "sample": SampleRequest,
}

Decoded = RunRequest | LoadWeightsRequest | CreateModelRequest | SampleRequest


def operation_decoder(kind: str, content_type: str, was_accepted: bool = False) -> Callable[[bytes], RunRequest]:
    """Returns the decoder of an operation, see json_decoder and forward_backward_decoder.

    was_accepted: by this version or an earlier one; it is not a new request.
    """
    if (model := _OPERATIONS.get(kind)) is not None:
        return json_decoder(model)
    return forward_backward_decoder(content_type, kind != "forward_backward", kind == "create_evaluation", was_accepted)


async def decode_entry(entry: JournalEntry) -> Decoded:
    """Returns the request as it was accepted, without limits of its size: it was within those in force then.

    Unknown fields are ignored, since earlier versions accepted them.

    Raises RequestError if this version would not accept it.
    """
    header, decode = entry.header, ignoring_unknown(_decoder(entry.header.kind, entry.header.content_type))
    received = ReceivedBody(entry.body, UNLIMITED, header.content_type, header.content_encoding)
    try:
        return await decode_body(received, decode)
    except RequestError as error:
        if error.status not in (413, 503):
            raise
        # The process that decodes large bodies ran out of memory or time: no reason to lose an accepted request.
        return await asyncio.to_thread(_decode_here, decode, received)


def _decode_here(decode: Callable[[bytes], Decoded], received: ReceivedBody) -> Decoded:
    return decode(decompress(received.body, received.content_encoding, received.limits.decompressed_bytes))


def _decoder(kind: str, content_type: str) -> Callable[[bytes], Decoded]:
    return partial(_from_json, _JSON[kind]) if kind in _JSON else operation_decoder(kind, content_type, True)


def _from_json(model: type[BaseModel], body: bytes, ignore_unknown: bool = False) -> Decoded:
    """Decodes the body, without `user_metadata` and with empty tokens if necessary.

    Earlier versions accepted metadata of any size, which rebuilding a run does not need, and chunks without tokens.
    """
    decode = partial(decode_model, model, most_bytes=UNLIMITED.decompressed_bytes, ignore_unknown=ignore_unknown)
    try:
        return decode(body)  # pyright: ignore[reportReturnType]
    except RequestError as refusal:
        try:
            fields = json.loads(body, object_hook=_with_tokens)
        except (ValueError, RecursionError):
            raise refusal from None
        if not isinstance(fields, dict):
            raise
        fields.pop("user_metadata", None)
        return decode(json.dumps(fields).encode())  # pyright: ignore[reportReturnType]


def _with_tokens(fields: JsonObject) -> JsonObject:
    return {"tokens": [], **fields} if fields.get("type") == "encoded_text" else fields

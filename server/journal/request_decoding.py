"""Decodes the requests of journaled entries, by their kind."""

import asyncio
import json
from collections.abc import Mapping
from functools import partial

from ...schemas.checkpoints import LoadWeightsRequest
from ...schemas.codec import JsonObject, decode_model
from ...schemas.errors import RequestError
from ...schemas.sampling import SampleRequest
from ...schemas.training import ForwardBackwardRequest, Request
from ..http.bodies import UNLIMITED, Body, Decoder, decode_body, decode_here, decoder_of
from ..http.verbs import VERBS
from .journal import JournalEntry

Decoded = Request | ForwardBackwardRequest

_OTHERS: Mapping[str, type[Request]] = {
    "create_model_from_checkpoint": LoadWeightsRequest,
    "sample": SampleRequest,
}
"""Journaled requests that are no verbs."""


async def decode_entry(entry: JournalEntry) -> Decoded:
    """Returns the request as it was accepted, without limits of its size: it was within those in force then.

    Unknown fields are ignored, since earlier versions accepted them.

    Raises RequestError if this version would not accept it.
    """
    header = entry.header
    decoder = _decoder(header.kind, header.content_type)
    body = Body(entry.body, UNLIMITED, header.content_type, header.content_encoding)
    try:
        return await decode_body(body, decoder, ignore_unknown=True)
    except RequestError as error:
        if error.status not in (413, 503):
            raise
        # The process that decodes large bodies ran out of memory or time: no reason to lose an accepted request.
        return await asyncio.to_thread(decode_here, body, partial(decoder.decode, ignore_unknown=True))


def _decoder(kind: str, content_type: str) -> Decoder[Decoded]:
    model = VERBS[kind].request if kind in VERBS else _OTHERS.get(kind)
    if model is None:
        raise ValueError(f"this version knows no request of kind {kind}")
    if issubclass(model, ForwardBackwardRequest):
        return decoder_of(VERBS[kind], content_type, was_accepted=True)  # pyright: ignore[reportReturnType]
    return Decoder(partial(_from_json, model))


def _from_json(model: type[Request], body: bytes, ignore_unknown: bool = False) -> Decoded:
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

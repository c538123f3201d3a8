"""Request bodies: read within a limit, decoded off the event loop when large, and described for OpenAPI."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import Depends, HTTPException, Request
from pydantic import BaseModel
from starlette.types import Message, Receive

from ...schemas.codec import PROTOBUF, decode_forward_backward, decode_model, decompress, decompressed_size, is_protobuf
from ...schemas.errors import RequestError
from ...schemas.training import ForwardBackwardRequest
from ..config.knobs import ServerConfig
from .decoding import decode_apart

LARGE_BYTES = 256 << 10
"""What is larger is decoded and encoded off the event loop."""

APART_JSON_BYTES = 1 << 20
APART_PROTOBUF_BYTES = 32 << 20
"""What is larger is decoded in a process of its own. Its parsers take about as long for the one as for the other."""

CONTROL_BODY_BYTES = 1 << 20
"""Most bytes of a body that carries no data of training or sampling."""

_PREFIX_BYTES = 1 << 20
_CHECKED_BYTES = 1 << 16

Decoded = TypeVar("Decoded")
Model = TypeVar("Model", bound=BaseModel)
JsonSchema = dict[str, object]


@dataclass(frozen=True)
class Received:
    """A body as received. too_large: it exceeded the limit, and `body` is only its beginning."""

    body: bytes
    content_type: str = "application/json"
    content_encoding: str | None = None
    too_large: bool = False


@dataclass(frozen=True)
class BodyLimits:
    received_bytes: int
    decompressed_bytes: int


def body_limits(config: ServerConfig, is_large: bool) -> BodyLimits:
    """Bodies that carry data of training or sampling are large. What is larger than half of the memory might never find
    room; it is refused, not put off."""
    received, decompressed = config.max_body_bytes, min(config.max_decompressed_bytes, config.queued_bytes // 2)
    if is_large:
        return BodyLimits(received, decompressed)
    return BodyLimits(min(received, CONTROL_BODY_BYTES), min(decompressed, CONTROL_BODY_BYTES))


def limits_of(request: Request) -> BodyLimits:
    """What the gate has found for its route."""
    return request.state.body_limits


@dataclass(frozen=True)
class Decoder(Generic[Decoded]):
    """What decodes a body that is not JSON, or not always. apart_bytes: from which size on in a process of its own."""

    decode: Callable[[bytes], Decoded]
    apart_bytes: float

    def __call__(self, body: bytes) -> Decoded:
        return self.decode(body)


class BodyTooLarge(HTTPException):
    """last_piece: the beginning of the one with which the body became too large."""

    def __init__(self, limit_bytes: int, last_piece: bytes = b"") -> None:
        remedy = "send less in one request"
        if limit_bytes != CONTROL_BODY_BYTES:
            remedy = "send fewer datums in one request, or start the server with a larger --max-body-bytes"
        super().__init__(413, f"the body is larger than {limit_bytes} bytes, which is the limit: {remedy}")
        self.last_piece = last_piece


def limited(receive: Receive, limit_bytes: int) -> Receive:
    """Reads a body of at most so many bytes; beyond, it raises BodyTooLarge.

    What follows is read and dropped, up to three times the limit: a client that is still sending would not read the
    answer.
    """
    num_bytes = 0

    async def receive_limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > limit_bytes:
            await _drop_rest(message, receive, 3 * limit_bytes)
            raise BodyTooLarge(limit_bytes, message["body"][:_PREFIX_BYTES])
        return message

    return receive_limited


async def _drop_rest(message: Message, receive: Receive, most_bytes: int) -> None:
    num_dropped = 0
    while message.get("more_body") and num_dropped < most_bytes:
        message = await receive()
        num_dropped += len(message.get("body", b""))


async def receive_body(request: Request, check: Callable[[bytes], Awaitable[None]] | None = None) -> Received:
    """Keeps no more than the beginning of a body that says, or shows, that it is too large.

    check: called with the beginning before more is kept; if it raises, the rest is read and dropped.
    """
    limit_bytes = limits_of(request).received_bytes
    most_kept = _PREFIX_BYTES if (declared_size(request) or 0) > limit_bytes else limit_bytes
    pieces: list[bytes] = []
    num_kept, too_large = 0, False
    try:
        stream = request.stream()
        if check is not None:
            pieces.append(await _checked_beginning(stream, check))
            num_kept = len(pieces[0])
        async for piece in stream:
            if num_kept < most_kept:
                pieces.append(piece)
                num_kept += len(piece)
    except BodyTooLarge as error:
        too_large = True
        pieces = [b"".join([*pieces, error.last_piece])[:_PREFIX_BYTES]]
    headers = request.headers
    return Received(
        b"".join(pieces), headers.get("content-type", "application/json"), headers.get("content-encoding"), too_large
    )


def declared_size(request: Request) -> int | None:
    """Bytes of the body, as its head says; None where it does not."""
    declared = request.headers.get("content-length", "")
    return int(declared) if re.fullmatch("[0-9]{1,18}", declared) else None


async def _checked_beginning(stream: AsyncIterator[bytes], check: Callable[[bytes], Awaitable[None]]) -> bytes:
    beginning = b""
    async for piece in stream:
        beginning += piece
        if len(beginning) >= _CHECKED_BYTES:
            break
    try:
        await check(beginning)
    except RequestError:
        # A client that is still sending would not read the answer.
        async for _ in stream:
            pass
        raise
    return beginning


async def decode_body(received: Received, limits: BodyLimits, decode: Callable[[bytes], Decoded]) -> Decoded:
    """Decompressed and decoded. Raises RequestError: 413 too large, or what decompressing and `decode` raise."""
    if received.too_large:
        refusal = BodyTooLarge(limits.received_bytes)
        raise RequestError(refusal.detail, refusal.status_code)
    size = await size_of(received, limits)
    if received.content_encoding is None and size < LARGE_BYTES:
        return decode(received.body)
    decode, apart_bytes = (
        (decode.decode, decode.apart_bytes) if isinstance(decode, Decoder) else (decode, APART_JSON_BYTES)
    )
    if size >= apart_bytes:
        return await decode_apart(decode, received.body, received.content_encoding, limits.decompressed_bytes)

    def decompress_and_decode() -> Decoded:
        return decode(decompress(received.body, received.content_encoding, limits.decompressed_bytes))

    return await asyncio.to_thread(decompress_and_decode)


async def size_of(received: Received, limits: BodyLimits) -> int:
    """Bytes once decompressed, before any memory is taken for it; as received where it is only a beginning. Raises
    RequestError."""
    if received.too_large or received.content_encoding is None:
        return len(received.body)
    most = limits.decompressed_bytes
    return await asyncio.to_thread(decompressed_size, received.body, received.content_encoding, most)


def json_decoder(model: type[Model]) -> Callable[[bytes], Model]:
    """Raises RequestError as decode_model does."""
    return partial(decode_model, model)


def forward_backward_decoder(content_type: str, forward_only: bool = False) -> Decoder[ForwardBackwardRequest]:
    """forward_only: whatever the body says of it. Raises RequestError as decode_forward_backward does."""
    apart_bytes = APART_PROTOBUF_BYTES if is_protobuf(content_type) else APART_JSON_BYTES
    return Decoder(partial(decode_forward_backward, content_type=content_type, forward_only=forward_only), apart_bytes)


def json_parameter(model: type[BaseModel]) -> Any:
    """A parameter of a route, which is its body, read and decoded once the gate has let the request in."""

    async def read(request: Request) -> BaseModel:
        return await decode_body(await receive_body(request), limits_of(request), json_decoder(model))

    return Depends(read)


# OpenAPI -------------------------------------------------------------------------------------------------------------


def json_body(model: type[BaseModel], example: dict[str, object]) -> JsonSchema:
    """The `openapi_extra` of a route that decodes its body itself."""
    model.model_validate(example)
    return {"requestBody": {"required": True, "content": {"application/json": _json_content(model, example)}}}


def json_or_protobuf_body(schema: JsonSchema, example: dict[str, object], message: str) -> JsonSchema:
    content = {
        "application/json": {"schema": schema, "example": example},
        PROTOBUF: {"schema": {"type": "string", "format": "binary", "description": message}},
    }
    return {"requestBody": {"required": True, "content": content}}


def _json_content(model: type[BaseModel], example: dict[str, object]) -> JsonSchema:
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    return {"schema": _inlined(schema, definitions), "example": example}


def _inlined(schema: object, definitions: dict[str, object]) -> object:
    """Without $ref, which would look for its target at the root of the OpenAPI document."""
    if isinstance(schema, list):
        return [_inlined(entry, definitions) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}

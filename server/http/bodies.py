"""Reads request bodies within a limit, decodes them, large ones off the event loop, and describes them for OpenAPI."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, cast

from fastapi import Depends, HTTPException, Request
from pydantic import BaseModel

from ...schemas.codec import (
    JSON,
    PROTOBUF,
    decode_forward_backward,
    decode_model,
    decompress,
    decompressed_size,
    format_of,
)
from ...schemas.errors import RequestError, UnknownField
from ...schemas.training import ForwardBackwardRequest
from ...schemas.verbs import CREATE_EVALUATION, FORWARD_BACKWARD, Verb
from ..config.server_config import ServerConfig
from .decoding import decode_in_process
from .digests import decode_with_digest
from .sdk_version import is_newer_than_tested, sdk_version

LARGE_BYTES = 256 << 10
"""Larger results are encoded off the event loop."""

QUICK_BYTES = 32 << 10
"""Smaller bodies are decoded on the event loop: however many parts they have, it takes tens of milliseconds at most."""

PROCESS_JSON_BYTES = 1 << 20
PROCESS_PROTOBUF_BYTES = 32 << 20
"""Larger bodies are decoded in a separate process. The parsers take about equally long for these two sizes."""

CONTROL_BODY_BYTES = 1 << 20
"""Largest body that carries no training or sampling data."""

STALLED_SECONDS = 120.0
"""A client that reads nothing of a response for this long is disconnected."""

_PREFIX_BYTES = 1 << 20
_CHECKED_BYTES = 1 << 16

T = TypeVar("T")
Decoded = TypeVar("Decoded")
Model = TypeVar("Model", bound=BaseModel)
JsonSchema = dict[str, object]


@dataclass(frozen=True)
class BodyLimits:
    """Limits on the bodies of a route. warns_of_unknown: unknown fields are not refused."""

    received_bytes: int
    decompressed_bytes: int
    warns_of_unknown: bool = False


UNLIMITED = BodyLimits(1 << 62, 1 << 62)

Tolerance = Literal["none", "without effect on results", "all"]
"""The unknown fields that are ignored instead of refused."""


@dataclass(eq=False)
class Body:
    """A request's body: what its head says, then what was received, which the journal keeps."""

    received: bytes = b""
    limits: BodyLimits = UNLIMITED
    """Those that its decompression must keep."""
    content_type: str = JSON
    content_encoding: str | None = None
    declared_bytes: int | None = None
    """The size according to Content-Length; None without a valid one."""
    most_bytes: int = 0
    """The declared size, at most the limit; the limit if none is declared."""
    user_agent: str = ""
    too_large: bool = False
    """True if it exceeded the limits, and `received` is only its beginning."""
    digest: str | None = None
    """The digest of its decoded content (see digests.py); None where it is not needed."""
    ignored: list[str] = field(default_factory=list)
    """Messages about unknown fields that were ignored, for the client."""

    @classmethod
    def announced(cls, request: Request, limits: BodyLimits) -> Self:
        """Returns the body that follows the head of the request."""
        headers, most = request.headers, limits.received_bytes
        declared = headers.get("content-length", "")
        declared_bytes = int(declared) if re.fullmatch("[0-9]{1,18}", declared) else None
        return cls(
            limits=limits,
            content_type=headers.get("content-type", JSON),
            content_encoding=headers.get("content-encoding"),
            declared_bytes=declared_bytes,
            most_bytes=most if declared_bytes is None else min(declared_bytes, most),
            user_agent=headers.get("user-agent", ""),
        )

    @property
    def tolerance(self) -> Tolerance:
        """Returns which unknown fields are ignored."""
        if self.limits.warns_of_unknown:
            return "all"
        # The program of an SDK that sends more than this version knows should run as long as its results are the same.
        return "without effect on results" if is_newer_than_tested(sdk_version(self.user_agent)) else "none"


def body_limits(config: ServerConfig, is_large: bool) -> BodyLimits:
    """Returns the size limits of a route.

    A body larger than half of `queued_bytes` might never fit in memory, so it is refused rather than throttled.

    Args:
        is_large: the route's bodies carry training or sampling data.
    """
    limits, warns = config.limits, config.sdk.unknown_fields == "warn"
    received, decompressed = limits.max_body_bytes, min(limits.max_decompressed_bytes, limits.queued_bytes // 2)
    if is_large:
        return BodyLimits(received, decompressed, warns)
    return BodyLimits(min(received, CONTROL_BODY_BYTES), min(decompressed, CONTROL_BODY_BYTES), warns)


@dataclass(frozen=True)
class Decoder(Generic[Decoded]):
    """A function that decodes bodies, and raises RequestError; it may have the option `ignore_unknown`."""

    decode: Callable[..., Decoded]
    process_bytes: float = PROCESS_JSON_BYTES
    """Bodies of at least this size are decoded in a separate process."""


class RunRequest(Protocol):
    """The request of an operation of a run."""

    @property
    def model_id(self) -> str | None: ...

    @property
    def seq_id(self) -> int | None: ...


def decoder_of(verb: Verb, content_type: str, was_accepted: bool = False) -> Decoder[RunRequest]:
    """Returns the decoder of the verb's requests.

    was_accepted: by this version or an earlier one; it is not a new request.
    """
    if not issubclass(verb.request, ForwardBackwardRequest):
        return Decoder(partial(decode_model, verb.request))  # pyright: ignore[reportReturnType]  (its fields)
    decode = partial(
        decode_forward_backward,
        content_type=content_type,
        forward_only=verb is not FORWARD_BACKWARD,
        evaluates=verb is CREATE_EVALUATION,
        was_accepted=was_accepted,
    )
    return Decoder(decode, PROCESS_PROTOBUF_BYTES if format_of(content_type) == "protobuf" else PROCESS_JSON_BYTES)


class BodyTooLarge(HTTPException):
    """A body exceeds its limit. last_piece: the beginning of the piece that exceeded it."""

    def __init__(self, limit_bytes: int, last_piece: bytes = b"") -> None:
        remedy = "send less in one request"
        if limit_bytes != CONTROL_BODY_BYTES:
            remedy = "send fewer datums in one request, or start the server with a larger --max-body-bytes"
        super().__init__(413, f"the body is larger than {limit_bytes} bytes, which is the limit: {remedy}")
        self.last_piece = last_piece


async def receive_body(request: Request, check: Callable[[bytes], Awaitable[None]] | None = None) -> Body:
    """Reads the body, keeping only its beginning if its declared or actual size exceeds the limit.

    Args:
        check: called with the beginning before more is kept; if it raises RequestError, the rest is read and dropped.
    """
    body: Body = request.state.body
    limits = body.limits
    most_kept = _PREFIX_BYTES if (body.declared_bytes or 0) > limits.received_bytes else limits.received_bytes
    pieces: list[bytes] = []
    num_kept = 0
    try:
        stream = request.stream()
        if check is not None:
            pieces.append(await _checked_beginning(stream, check))
            num_kept = len(pieces[0])
        async for piece in stream:
            if num_kept < most_kept:
                pieces.append(piece)
                num_kept += len(piece)
        body.received = b"".join(pieces)
    except BodyTooLarge as error:
        body.too_large = True
        body.received = b"".join([*pieces, error.last_piece])[:_PREFIX_BYTES]
    return body


async def receive_json(request: Request, model: type[Model]) -> Model:
    """Receives and decodes a JSON body. Raises RequestError."""
    return await decode_body(await receive_body(request), Decoder(partial(decode_model, model)))


async def _checked_beginning(stream: AsyncIterator[bytes], check: Callable[[bytes], Awaitable[None]]) -> bytes:
    beginning = b""
    async for piece in stream:
        beginning += piece
        if len(beginning) >= _CHECKED_BYTES:
            break
    try:
        await check(beginning)
    except RequestError:
        # A client that is still sending would not read the response.
        async for _ in stream:
            pass
        raise
    return beginning


async def decode_body(
    body: Body, decoder: Decoder[Decoded], is_numbered: bool = False, ignore_unknown: bool = False
) -> Decoded:
    """Returns the body decompressed and decoded; large ones are decoded off the event loop.

    Args:
        is_numbered: the request has a number, by which a retry is recognized: the body gets its digest.
    Raises:
        RequestError: 413 if it is too large, or the error of decompression or of the decoder.
    """
    if body.too_large:
        refusal = BodyTooLarge(body.limits.received_bytes)
        raise RequestError(refusal.detail, refusal.status_code)
    decode = partial(decoder.decode, ignore_unknown=True) if ignore_unknown else decoder.decode
    if is_numbered:  # hashed where it is decoded, since large ones take long
        decode = partial(decode_with_digest, decode)
    try:
        if body.content_encoding is None and len(body.received) < QUICK_BYTES:
            decoded = decode(body.received)
        elif await size_of(body) < decoder.process_bytes:
            decoded = await asyncio.to_thread(decode_here, body, decode)
        else:
            limit = body.limits.decompressed_bytes
            decoded = await decode_in_process(decode, body.received, body.content_encoding, limit)
    except UnknownField as error:
        if body.tolerance == "none" or (body.tolerance != "all" and error.changes_results):
            raise
        body.ignored.append(error.message)
        return await decode_body(body, decoder, is_numbered, ignore_unknown=True)
    if is_numbered:
        decoded, body.digest = cast(tuple[Decoded, str], decoded)
    return cast(Decoded, decoded)


def decode_here(body: Body, decode: Callable[[bytes], T]) -> T:
    """Decompresses and decodes in this thread."""
    return decode(decompress(body.received, body.content_encoding, body.limits.decompressed_bytes))


async def size_of(body: Body) -> int:
    """Returns the decompressed size in bytes without allocating it, or the received size if the body was cut off.

    Raises RequestError if the body cannot be decompressed within the limit.
    """
    if body.too_large or body.content_encoding is None:
        return len(body.received)
    most = body.limits.decompressed_bytes
    return await asyncio.to_thread(decompressed_size, body.received, body.content_encoding, most)


def json_parameter(model: type[BaseModel]) -> Any:
    """Returns a route parameter for the request's body, read and decoded after the gate has admitted the request."""

    async def read(request: Request) -> BaseModel:
        return await receive_json(request, model)

    return Depends(read)


def json_body(model: type[BaseModel], example: Mapping[str, object]) -> JsonSchema:
    """Returns the `openapi_extra` of a route that decodes its body itself."""
    model.model_validate(example)
    return {"requestBody": {"required": True, "content": {"application/json": _json_content(model, example)}}}


def json_or_protobuf_body(schema: JsonSchema, example: Mapping[str, object], message: str) -> JsonSchema:
    content = {
        "application/json": {"schema": schema, "example": example},
        PROTOBUF: {"schema": {"type": "string", "format": "binary", "description": message}},
    }
    return {"requestBody": {"required": True, "content": content}}


def _json_content(model: type[BaseModel], example: Mapping[str, object]) -> JsonSchema:
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    return {"schema": _inlined(schema, definitions), "example": example}


def _inlined(schema: object, definitions: dict[str, object]) -> object:
    """Returns the schema with each $ref replaced by its target, since OpenAPI resolves $ref at the document's root."""
    if isinstance(schema, list):
        return [_inlined(entry, definitions) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}

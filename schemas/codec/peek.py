"""Reads the address of an operation from the first bytes of a body that is too large or too broken to decode."""

import re
from dataclasses import dataclass
from itertools import islice

from ..bounds import load_json
from .compression import ZSTD_MAGIC, decompressed_prefix
from .formats import format_of
from .protobuf_fields import protobuf_fields

_PEEK_BYTES = 1 << 20
_MAX_ID_BYTES = 1024
_MAX_FIELDS = 10_000
_MAX_TOKENS = 100_000
"""Limits on what a client can put in front of the address, since a peek runs on the event loop."""


@dataclass(frozen=True)
class PeekedOperation:
    """The address of an operation; parts that could not be read are None."""

    model_id: str | None = None
    seq_id: int | None = None


def peek_operation(prefix: bytes, content_type: str) -> PeekedOperation:
    """Reads model_id and seq_id from the first bytes of a body that is too large or too broken to decode.

    The prefix may be zstd-compressed. Never raises; what cannot be read is None.
    """
    prefix = prefix[:_PEEK_BYTES]
    if prefix.startswith(ZSTD_MAGIC):
        prefix = decompressed_prefix(prefix, _PEEK_BYTES)
    return _peek_protobuf(prefix) if format_of(content_type) == "protobuf" else _peek_json(prefix)


def _peek_protobuf(prefix: bytes) -> PeekedOperation:
    """Reads fields 1 and 2 of ForwardBackwardRequest, if the prefix contains them."""
    found: dict[int, memoryview | int | None] = {}
    for number, value in islice(protobuf_fields(memoryview(prefix)), _MAX_FIELDS):
        found.setdefault(number, value)
        if 1 in found and 2 in found:
            break
    model_id, seq_id = found.get(1), found.get(2)
    return PeekedOperation(
        _peeked_id(bytes(model_id)) if isinstance(model_id, memoryview) else None,
        seq_id if isinstance(seq_id, int) and seq_id < 2**31 else None,
    )


def _peeked_id(model_id: bytes) -> str | None:
    try:
        return model_id.decode() if 0 < len(model_id) <= _MAX_ID_BYTES else None
    except UnicodeDecodeError:
        return None


# An unterminated string is one token: searching for its end again from each quote in it would take quadratic time.
_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\]:]|[^\s{}\[\],:"]++', re.DOTALL)


def _peek_json(prefix: bytes) -> PeekedOperation:
    """Reads the values of top-level keys of an object that may be truncated or broken anywhere."""
    text = prefix.decode(errors="replace")
    if not text.lstrip().startswith("{"):
        return PeekedOperation()
    found: dict[str, str] = {}
    depth, key, previous = 0, "", ""
    for match in islice(_JSON_TOKENS.finditer(text), _MAX_TOKENS):
        token = match[0]
        if depth == 1 and previous == ":" and key in ('"model_id"', '"seq_id"'):
            found.setdefault(key, token)
        depth += (token in "{[") - (token in "}]")
        key, previous = previous, token
        if len(found) == 2:
            break
    model_id, seq_id = found.get('"model_id"', ""), found.get('"seq_id"', "")
    return PeekedOperation(_peeked_text(model_id), int(seq_id) if re.fullmatch("[0-9]{1,18}", seq_id) else None)


def _peeked_text(token: str) -> str | None:
    if not token.startswith('"'):
        return None
    try:
        return _peeked_id(load_json(token).encode())
    except ValueError:
        return None

"""The address of an operation, read from the first bytes of a body that is too large or too broken to decode."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .compression import ZSTD_MAGIC, decompressed_prefix
from .formats import is_protobuf

_PEEK_BYTES = 1 << 20
_MAX_ID_BYTES = 1024


@dataclass(frozen=True)
class PeekedOperation:
    """The address of an operation, as far as it could be read."""

    model_id: str | None = None
    seq_id: int | None = None


def peek_operation(prefix: bytes, content_type: str) -> PeekedOperation:
    """model_id and seq_id from the first bytes of a body that is too large or too broken to decode.

    The prefix may be zstd-compressed. Never raises; what cannot be read is None.
    """
    prefix = prefix[:_PEEK_BYTES]
    if prefix.startswith(ZSTD_MAGIC):
        prefix = decompressed_prefix(prefix, _PEEK_BYTES)
    return _peek_protobuf(prefix) if is_protobuf(content_type) else _peek_json(prefix)


def _peek_protobuf(prefix: bytes) -> PeekedOperation:
    """Fields 1 and 2 of ForwardBackwardRequest, as far as the bytes go."""
    found: dict[int, bytes | int] = {}
    for number, value in _protobuf_fields(prefix):
        found.setdefault(number, value)
        if 1 in found and 2 in found:
            break
    model_id, seq_id = found.get(1), found.get(2)
    return PeekedOperation(
        _peeked_id(model_id) if isinstance(model_id, bytes) else None,
        seq_id if isinstance(seq_id, int) and seq_id < 2**31 else None,
    )


def _peeked_id(model_id: bytes) -> str | None:
    try:
        return model_id.decode() if 0 < len(model_id) <= _MAX_ID_BYTES else None
    except UnicodeDecodeError:
        return None


def _protobuf_fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(field number, value) of varint and length-delimited fields until the bytes end or make no sense."""
    position = 0
    while (tag := _varint(data, position)) is not None:
        number, wire_type, position = tag.value >> 3, tag.value & 7, tag.end
        if wire_type in (1, 5):
            position += 8 if wire_type == 1 else 4
            continue
        if wire_type not in (0, 2) or (value := _varint(data, position)) is None:
            return
        position = value.end
        if wire_type == 0:
            yield number, value.value
            continue
        position += value.value
        if position > len(data):
            return
        yield number, data[value.end : position]


@dataclass(frozen=True)
class _Varint:
    value: int
    end: int


def _varint(data: bytes, position: int) -> _Varint | None:
    value = 0
    for index, byte in enumerate(data[position : position + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return _Varint(value, position + index + 1)
    return None


_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}\[\]:]|[^\s{}\[\],:"]++')


def _peek_json(prefix: bytes) -> PeekedOperation:
    """The values of the keys at the top level of an object that may be cut off or broken anywhere."""
    text = prefix.decode(errors="replace")
    if not text.lstrip().startswith("{"):
        return PeekedOperation()
    found: dict[str, str] = {}
    depth, key, previous = 0, "", ""
    for token in _JSON_TOKENS.findall(text):
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
        return _peeked_id(json.loads(token).encode())
    except ValueError:
        return None

"""Reads protobuf fields without a parser, for bodies that are too broken or too large to parse."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from .formats import Invalid

_NUM_DATA = 3
"""Field number of ForwardBackwardRequest.data."""


def check_num_messages(body: bytes, limit: int) -> None:
    """Raises Invalid if a forward_backward body has more messages, two levels deep, than `limit`.

    A message of two bytes in the body takes a hundred bytes or more in a parser, so a body within the size limit could
    use many times its size in memory.
    """
    num_fields = 0
    for number, value in protobuf_fields(memoryview(body)):
        num_fields += 1
        if number == _NUM_DATA and isinstance(value, memoryview):
            num_fields += sum(1 for _ in islice(protobuf_fields(value), limit + 1))
        if num_fields > limit:
            raise Invalid(f"the body has more than {limit} datums, chunks, inputs and spans: send it in several calls")


def protobuf_fields(data: memoryview) -> Iterator[tuple[int, memoryview | int | None]]:
    """Yields (field number, value) until the bytes end or are malformed; the value of a fixed-width number is None."""
    position = 0
    while (tag := _varint(data, position)) is not None:
        number, wire_type, position = tag.value >> 3, tag.value & 7, tag.end
        if wire_type in (1, 5):
            position += 8 if wire_type == 1 else 4
            yield number, None
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


def _varint(data: memoryview, position: int) -> _Varint | None:
    value = 0
    for index, byte in enumerate(data[position : position + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return _Varint(value, position + index + 1)
    return None

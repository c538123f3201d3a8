"""Defines the format of a segment, a file of checksummed records, and reads it.

Readers ignore a torn end (an incomplete last record) and report damage.
"""

import logging
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...schemas.bounds import load_json
from .directories import open_regular

logger = logging.getLogger(__name__)

MAGIC = b"trainhouse segment 2\n"
_MAGIC_1 = b"trainhouse segment 1\n"
TAG_BYTES = 8
"""A random tag per segment, stored after the magic and before each record, so that no body that a client sent can pass
for a record. Format 1 had none."""
HEAD_BYTES = len(MAGIC) + TAG_BYTES
FRAME = struct.Struct("<III")
"""Follows the tag: bytes of the header, bytes of the body, crc32 of both. The header and the body follow."""

SUFFIX = ".segment"
SEGMENT_DIRECTORIES = ("journal", "results", "recordings")
"""The directories of a server's live state that hold segments."""

MAX_BODY_BYTES = (1 << 32) - 1
"""The largest length that fits into the frame."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record as it was appended: a small JSON object and a body."""

    header: Mapping[str, object]
    body: bytes
    offset: int
    """The offset of its first byte in the segment."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage of a segment from `offset` up to the next complete record, or to its end if none can be found."""

    offset: int
    header: Mapping[str, object] | None
    """The header of the first damaged record, as far as it can be read; unverified."""


def read_segment(path: Path) -> Iterator[LogRecord]:
    """Yields the complete records in the order in which they were written. Torn ends and damage are logged."""
    return (found for found in scan_segment(path) if isinstance(found, LogRecord))


def scan_segment(path: Path) -> Iterator[LogRecord | Damage]:
    """Like `read_segment`, but also yields damage, except for a torn end: its appends were never acknowledged."""
    if path.exists() and not path.is_file():
        logger.error("%s is not a file: it is skipped", path)
        yield Damage(0, None)
        return
    with open_regular(path) as file:
        if (tag := tag_of(file)) is None:
            if path.stat().st_size > HEAD_BYTES:
                logger.error("%s is not a segment of this version, or its head is damaged: it is skipped", path)
                yield Damage(0, None)
            return
        while True:
            while (record := read_record(file, tag)) is not None:
                yield record
            if (damage := _damage(file, tag)) is None:
                break
            logger.error("%s is damaged: its content from byte %d to %d is lost", path, damage.offset, file.tell())
            yield damage
        torn_bytes = path.stat().st_size - file.tell()
    if torn_bytes:
        logger.warning("%s is torn: its last %d bytes are not a complete record", path, torn_bytes)


def complete_bytes(segment: Path) -> int | None:
    """Returns the offset after the last complete record, or None if the file is not a segment."""
    if segment.exists() and not segment.is_file():
        return None
    with open_regular(segment) as file:
        if (tag := tag_of(file)) is None:
            file.seek(0)
            head = file.read(HEAD_BYTES)
            is_torn = len(head) < HEAD_BYTES and MAGIC.startswith(head[: len(MAGIC)])
            return 0 if is_torn else None
        end = file.tell()
        for found in scan_segment(segment):
            if isinstance(found, LogRecord):
                file.seek(found.offset)
                read_record(file, tag)
                end = file.tell()
    return end


def truncate_segment(segment: Path, num_bytes: int) -> None:
    """Truncates the segment to `num_bytes`; deletes a file that would hold no record."""
    if num_bytes <= HEAD_BYTES:
        segment.unlink()
        return
    with segment.open("r+b") as file:
        file.truncate(num_bytes)


def tag_of(file: BinaryIO) -> bytes | None:
    """Reads the head and returns the tag, leaving the file after the head. None if the head is not complete."""
    magic = file.read(len(MAGIC))
    if magic == _MAGIC_1:
        return b""
    tag = file.read(TAG_BYTES)
    if magic != MAGIC or len(tag) < TAG_BYTES:
        return None
    # The tag in the head may itself be damaged; the first record, which repeats it, begins here.
    at_first_record = file.read(TAG_BYTES)
    is_damaged = at_first_record not in (b"", tag) and tag not in file.read()
    file.seek(HEAD_BYTES)
    return at_first_record if is_damaged else tag


def _damage(file: BinaryIO, tag: bytes) -> Damage | None:
    """Returns the damage at the file's position and moves the file to the next complete record; None if there is no
    such record, with the file where it was."""
    offset = file.tell()
    rest = file.read()
    if rest and not tag:  # without a tag, in format 1, the next record cannot be found
        return Damage(offset, _header_in(rest) if len(rest) > FRAME.size else None)
    at = rest.find(tag, 1)
    while at >= 0:
        file.seek(offset + at)
        if read_record(file, tag) is not None:
            file.seek(offset + at)
            return Damage(offset, _header_in(rest[len(tag) :]))
        at = rest.find(tag, at + 1)
    file.seek(offset)
    return None


def _header_in(damaged: bytes) -> Mapping[str, object] | None:
    """Returns the header of a record with a wrong checksum, if only the body seems to be damaged."""
    header_bytes, _, _ = FRAME.unpack(damaged[: FRAME.size])
    try:
        header = load_json(damaged[FRAME.size : FRAME.size + header_bytes])
    except ValueError:
        return None
    return header if isinstance(header, dict) else None


def read_record(file: BinaryIO, tag: bytes) -> LogRecord | None:
    """Reads a record. None, with the file back at the start, if no complete record follows."""
    offset = file.tell()
    if (record := _whole_record(file, tag, offset)) is None:
        file.seek(offset)
    return record


def read_header(file: BinaryIO, tag: bytes) -> Mapping[str, object]:
    """Reads the header of the record that follows, without its body. Raises ValueError if it is damaged."""
    at_record, frame = file.read(len(tag)), file.read(FRAME.size)
    if at_record != tag or len(frame) < FRAME.size:
        raise ValueError("no record begins there")
    header = load_json(file.read(FRAME.unpack(frame)[0]))
    if not isinstance(header, dict):
        raise ValueError("the header of the record is damaged")
    return header


def _whole_record(file: BinaryIO, tag: bytes, offset: int) -> LogRecord | None:
    if file.read(len(tag)) != tag or len(frame := file.read(FRAME.size)) < FRAME.size:
        return None
    header_bytes, body_bytes, checksum = FRAME.unpack(frame)
    # A crash can leave zeros at the end of a file, and they have the checksum of an empty record.
    if header_bytes == 0 or header_bytes + body_bytes > os.fstat(file.fileno()).st_size - file.tell():
        return None
    header, body = file.read(header_bytes), file.read(body_bytes)
    if zlib.crc32(body, zlib.crc32(header)) != checksum:
        return None
    return LogRecord(load_json(header), body, offset)

"""A write-ahead log: a directory of append-only segment files of checksummed records, and a reader that detects torn
ends.

An appended record survives a crash of this process; with `sync`, also one of the machine. The journal, the results and
the recordings use this, and each decides when a segment may be deleted.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BufferedWriter
from pathlib import Path
from typing import BinaryIO

from .directories import make_directory, sync_directory

logger = logging.getLogger(__name__)

_MAGIC = b"trainhouse segment 2\n"
_MAGIC_1 = b"trainhouse segment 1\n"
_TAG_BYTES = 8
"""A random tag per segment, stored after the magic and before each record, so that no body that a client sent can pass
for a record. Format 1 had none."""
_HEAD_BYTES = len(_MAGIC) + _TAG_BYTES
_FRAME = struct.Struct("<III")
"""Follows the tag: bytes of the header, bytes of the body, crc32 of both."""

_SUFFIX = ".segment"
_TRIAL = ".trial-"
MOST_BODY_BYTES = (1 << 32) - 1
"""The largest length that fits into the frame."""
_MOST_HEADER_BYTES = 16 << 20
_SMALL_BYTES = 32 << 10
"""Writing less than this into the page cache is faster than a round trip to a thread."""


Guard = Callable[[], None]
"""Raises OSError if this process may no longer write."""


@dataclass(frozen=True, slots=True)
class RecordPosition:
    """Position of a record: the number of its segment and the offset of its first byte."""

    segment: int
    offset: int

    def __str__(self) -> str:
        return f"{self.segment}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> "RecordPosition":
        segment, _, offset = text.partition(":")
        return cls(int(segment), int(offset))


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record as it was appended.

    header: a small JSON object.
    offset: of its first byte in the segment.
    """

    header: Mapping[str, object]
    body: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """A damaged stretch of a segment that is followed by a complete record.

    header: as far as it can be read; unverified.
    """

    offset: int
    header: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class _PendingAppend:
    header: bytes
    body: bytes
    written: "asyncio.Future[RecordPosition]"


class RecordTooLarge(OSError):
    """The record exceeds the size that a segment can store, regardless of free space. Nothing was written."""


class SegmentLog:
    """Appends records to the segments of a directory, as its only writer. Segments of earlier processes are listed in
    `earlier` and never appended to.

    guard: called before and after each write. If it raises afterwards the append fails, although the record may be on
        disk.
    """

    def __init__(self, directory: Path, segment_bytes: int, sync: bool = False, guard: Guard = lambda: None) -> None:
        self._directory = directory
        self._sync = sync
        self._guard = guard
        self._segment_bytes = segment_bytes
        make_directory(directory, sync)
        self.earlier = sorted(int(path.stem) for path in directory.glob(f"*{_SUFFIX}"))
        self.current = self.earlier[-1] + 1 if self.earlier else 0
        self._file: BufferedWriter | None = None
        self._tag = b""
        self._file_bytes = 0
        self._pending: list[_PendingAppend] = []
        self._flush: asyncio.Task[None] | None = None
        self._deleting: set[asyncio.Future[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=directory.name)

    def append(self, header: Mapping[str, object], body: bytes = b"") -> "asyncio.Future[RecordPosition]":
        """Appends a record. The future is done as soon as the operating system has it.

        A small record is written before this returns unless others are queued. Larger ones are written by a thread,
        queued ones in one batch. After an OSError other than the guard's (disk full, directory deleted, out of memory),
        later appends start a new segment.

        Raises:
            OSError: (in the future) the record was not written, or the guard raised.
            RecordTooLarge: (in the future) the body exceeds MOST_BODY_BYTES, or the header its limit.
        """
        written: asyncio.Future[RecordPosition] = asyncio.get_running_loop().create_future()
        append = _PendingAppend(json.dumps(header, separators=(",", ":")).encode(), body, written)
        if len(append.header) > _MOST_HEADER_BYTES or len(body) > MOST_BODY_BYTES:
            written.set_exception(
                RecordTooLarge(
                    f"a record with {len(append.header)} bytes of header and {len(body)} of body is too large: at most "
                    f"{_MOST_HEADER_BYTES} and {MOST_BODY_BYTES} can be stored"
                )
            )
            return written
        if self._flush is None and len(body) < _SMALL_BYTES and not self._sync:
            self._write_at_once(append)
            return written
        self._pending.append(append)
        if self._flush is None:
            self._flush = asyncio.create_task(self._write_pending())
        return written

    async def check_writable(self) -> None:
        """Writes and removes a temporary file. Raises OSError if nothing can be appended."""
        await asyncio.to_thread(self._try_to_write)

    def _try_to_write(self) -> None:
        self._guard()
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix=_TRIAL) as file:
            file.write(bytes(_SMALL_BYTES))
            file.flush()

    async def read(self, place: RecordPosition) -> LogRecord:
        """Raises ValueError if there is no complete record at `place`, OSError if the segment cannot be read."""
        return await asyncio.get_running_loop().run_in_executor(None, self._read, place)

    def path(self, segment: int) -> Path:
        return self._directory / f"{segment:08d}{_SUFFIX}"

    def delete(self, segment: int) -> None:
        """Deletes a segment in a thread, since freeing 64 MiB takes tens of milliseconds."""
        assert segment != self.current, "the segment being written cannot be deleted"
        unlink = partial(self.path(segment).unlink, missing_ok=True)
        deleting = asyncio.get_running_loop().run_in_executor(None, unlink)
        self._deleting.add(deleting)
        deleting.add_done_callback(self._deleted)

    def _deleted(self, deleting: "asyncio.Future[None]") -> None:
        self._deleting.discard(deleting)
        if not deleting.cancelled() and (error := deleting.exception()) is not None:
            logger.error("a segment that is no longer needed could not be deleted: %s", error)

    def delete_older_than(self, seconds: float) -> None:
        """Deletes segments whose last record is older; the current one stays. Blocking."""
        oldest = time.time() - seconds
        for path in self._directory.glob(f"*{_SUFFIX}"):
            if int(path.stem) != self.current and path.stat().st_mtime < oldest:
                path.unlink()

    async def close(self) -> None:
        """Waits for pending writes and deletions, then closes the file."""
        while self._flush is not None:
            await self._flush
        if self._deleting:
            await asyncio.wait(self._deleting)
        self._thread.shutdown()
        self._close_file()

    def _write_at_once(self, append: _PendingAppend) -> None:
        try:
            append.written.set_result(self._write_guarded([append])[0])
        except Exception as error:
            append.written.set_exception(_as_os_error(error))

    async def _write_pending(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            batch, self._pending = self._pending, []
            try:
                places = await loop.run_in_executor(self._thread, self._write_guarded, batch)
            except Exception as error:  # any error must reach the callers that wait, and later appends must continue
                _fail(batch, _as_os_error(error))
                continue
            for append, place in zip(batch, places, strict=True):
                if not append.written.cancelled():
                    append.written.set_result(place)
        self._flush = None

    def _write_guarded(self, batch: list[_PendingAppend]) -> list[RecordPosition]:
        """Runs in the writer's thread, or on the event loop while that thread is idle."""
        self._guard()
        places = self._write(batch)
        # A write that ended too late must not be acknowledged, although another process may have read it already.
        self._guard()
        return places

    def _write(self, batch: list[_PendingAppend]) -> list[RecordPosition]:
        file, num_bytes = self._file, self._file_bytes
        try:
            # A batch goes into one segment, so that a batch that fails can be cut off as a whole.
            writer = self._writable()
            places = [self._write_one(writer, append) for append in batch]
            writer.flush()
            if self._sync:
                os.fsync(writer.fileno())
        except Exception:  # MemoryError, too, can occur in the middle of a record
            # The file may end in half a record, which nothing may follow. Complete records of the batch must go too,
            # since their appends are reported as failed.
            _cut_off(self._file, num_bytes if self._file is file else 0)
            self._next_segment()
            raise
        return places

    def _write_one(self, file: BufferedWriter, append: _PendingAppend) -> RecordPosition:
        place = RecordPosition(self.current, self._file_bytes)
        checksum = zlib.crc32(append.body, zlib.crc32(append.header))
        file.write(self._tag + _FRAME.pack(len(append.header), len(append.body), checksum))
        file.write(append.header)
        file.write(append.body)
        self._file_bytes += _TAG_BYTES + _FRAME.size + len(append.header) + len(append.body)
        return place

    def _writable(self) -> BufferedWriter:
        if self._file is not None and self._file_bytes >= self._segment_bytes:
            self._file.flush()
            if self._sync:
                os.fsync(self._file.fileno())
            self._next_segment()
        if self._file is None:
            self._file = BufferedWriter(self.path(self.current).open("xb", buffering=0), 1 << 18)
            if self._sync:
                sync_directory(self._directory)
            self._tag = secrets.token_bytes(_TAG_BYTES)
            self._file.write(_MAGIC + self._tag)
            self._file_bytes = _HEAD_BYTES
        return self._file

    def _next_segment(self) -> None:
        self._close_file()
        self.current += 1

    def _close_file(self) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            logger.error("closing %s failed: %s", self._file.name, error)
        self._file = None

    def _read(self, place: RecordPosition) -> LogRecord:
        with self.path(place.segment).open("rb") as file:
            tag = _tag_of(file)
            file.seek(place.offset)
            record = None if tag is None else _read_record(file, tag)
        if record is None:
            raise ValueError(f"no whole record at {place} in {self._directory}")
        return record


def fence_off_writer(directory: Path) -> None:
    """Fences off a former writer: its open segment is replaced by a copy, so that later writes reach no reader.
    Blocking.

    Only the newest segment can be open for writing. Raises OSError.
    """
    newest = max(directory.glob(f"*{_SUFFIX}"), default=None)
    if newest is None:
        return
    copy = newest.with_suffix(".copy")
    try:
        shutil.copyfile(newest, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
        copy.replace(newest)
    finally:
        copy.unlink(missing_ok=True)
    sync_directory(directory)


def read_segment(path: Path) -> Iterator[LogRecord]:
    """Yields the complete records in the order in which they were written. Torn ends and damage are logged."""
    return (found for found in scan_segment(path) if isinstance(found, LogRecord))


def scan_segment(path: Path) -> Iterator[LogRecord | DamagedRange]:
    """Like `read_segment`, but also yields damage between complete records. A torn end, which a crash leaves, is not
        yielded:
    its appends were never acknowledged.
    """
    with path.open("rb") as file:
        if (tag := _tag_of(file)) is None:
            if path.stat().st_size > _HEAD_BYTES:
                logger.error("%s is not a segment of this version, or its head is damaged: it is skipped", path)
                yield DamagedRange(0, None)
            return
        while True:
            while (record := _read_record(file, tag)) is not None:
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
    with segment.open("rb") as file:
        if (tag := _tag_of(file)) is None:
            file.seek(0)
            return 0 if _MAGIC.startswith(file.read(_HEAD_BYTES)) else None
        end = file.tell()
        for found in scan_segment(segment):
            if isinstance(found, LogRecord):
                file.seek(found.offset)
                _read_record(file, tag)
                end = file.tell()
    return end


def truncate_segment(segment: Path, num_bytes: int) -> None:
    """Truncates the segment to `num_bytes`; deletes a file that would hold no record."""
    if num_bytes <= _HEAD_BYTES:
        segment.unlink()
        return
    with segment.open("r+b") as file:
        file.truncate(num_bytes)


def _tag_of(file: BinaryIO) -> bytes | None:
    """Reads the head and returns the tag, leaving the file after the head. None if the head is not complete."""
    magic = file.read(len(_MAGIC))
    if magic == _MAGIC_1:
        return b""
    tag = file.read(_TAG_BYTES)
    if magic != _MAGIC or len(tag) < _TAG_BYTES:
        return None
    # The tag in the head may itself be damaged; the first record, which repeats it, begins here.
    at_first_record = file.read(_TAG_BYTES)
    is_damaged = at_first_record not in (b"", tag) and tag not in file.read()
    file.seek(_HEAD_BYTES)
    return at_first_record if is_damaged else tag


def _damage(file: BinaryIO, tag: bytes) -> DamagedRange | None:
    """Returns the damage at the file's position and moves the file to the next complete record.

    None if no record follows; then the file stays where it is.
    """
    offset = file.tell()
    rest = file.read()
    if rest and not tag:  # without a tag, in format 1, the next record cannot be found
        return DamagedRange(offset, _header_in(rest) if len(rest) > _FRAME.size else None)
    at = rest.find(tag, 1)
    while at >= 0:
        file.seek(offset + at)
        if _whole_record(file, tag, offset + at) is not None:
            file.seek(offset + at)
            return DamagedRange(offset, _header_in(rest[len(tag) :]))
        at = rest.find(tag, at + 1)
    file.seek(offset)
    return None


def _header_in(damaged: bytes) -> Mapping[str, object] | None:
    """Returns the header of a record with a wrong checksum, if only the body seems to be damaged."""
    header_bytes, _, _ = _FRAME.unpack(damaged[: _FRAME.size])
    try:
        header = json.loads(damaged[_FRAME.size : _FRAME.size + header_bytes])
    except ValueError:
        return None
    return header if isinstance(header, dict) else None


def _read_record(file: BinaryIO, tag: bytes) -> LogRecord | None:
    """Reads a record. None, with the file back at the start, if no complete record follows."""
    offset = file.tell()
    record = _whole_record(file, tag, offset)
    if record is None:
        file.seek(offset)
    return record


def _whole_record(file: BinaryIO, tag: bytes, offset: int) -> LogRecord | None:
    if file.read(len(tag)) != tag or len(frame := file.read(_FRAME.size)) < _FRAME.size:
        return None
    header_bytes, body_bytes, checksum = _FRAME.unpack(frame)
    # A crash can leave zeros at the end of a file, and they have the checksum of an empty record.
    if header_bytes == 0 or header_bytes + body_bytes > os.fstat(file.fileno()).st_size - file.tell():
        return None
    header, body = file.read(header_bytes), file.read(body_bytes)
    if zlib.crc32(body, zlib.crc32(header)) != checksum:
        return None
    return LogRecord(json.loads(header), body, offset)


def _cut_off(file: BufferedWriter | None, num_bytes: int) -> None:
    """Truncates what was written since; an empty file is deleted. If that fails, readers find no complete record
    there.
    """
    if file is None or file.closed:
        return
    with contextlib.suppress(OSError):
        os.ftruncate(file.fileno(), num_bytes)
        if num_bytes == 0:
            os.unlink(file.name)
    # BufferedWriter.close would write its buffer after a hole, now that there is space.
    file.raw.close()


def _as_os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")


def _fail(batch: list[_PendingAppend], error: OSError) -> None:
    for append in batch:
        if not append.written.cancelled():
            append.written.set_exception(error)

"""A write-ahead log: a directory of append-only segments.

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
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BufferedWriter
from pathlib import Path

from .directories import make_directory, open_regular, sync_directory
from .segment import (
    FRAME,
    HEAD_BYTES,
    MAGIC,
    MAX_BODY_BYTES,
    SUFFIX,
    TAG_BYTES,
    LogRecord,
    read_header,
    read_record,
    tag_of,
)

logger = logging.getLogger(__name__)

_TRIAL = ".trial-"
_MAX_HEADER_BYTES = 16 << 20
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
class _PendingAppend:
    header: bytes
    body: bytes
    written: "asyncio.Future[RecordPosition]"


class RecordTooLarge(OSError):
    """The record exceeds the size that a segment can store, regardless of free space. Nothing was written."""


class SegmentLog:
    """Appends records to the segments of a directory, as its only writer; never to those of earlier processes.

    guard: called before and after each write. If it raises afterwards, the append fails with the record on disk.
    """

    def __init__(self, directory: Path, segment_bytes: int, sync: bool = False, guard: Guard = lambda: None) -> None:
        self._directory = directory
        self._sync = sync
        self._guard = guard
        self._segment_bytes = segment_bytes
        make_directory(directory, sync)
        self.earlier = sorted(int(path.stem) for path in directory.glob(f"*{SUFFIX}"))
        self.current = self.earlier[-1] + 1 if self.earlier else 0
        self._file: BufferedWriter | None = None
        self._tag = b""
        self._file_bytes = 0
        self._pending: list[_PendingAppend] = []
        self._flush: asyncio.Task[None] | None = None
        self._deleting: set[asyncio.Future[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=directory.name)

    def append(self, header: Mapping[str, object], body: bytes = b"") -> "asyncio.Future[RecordPosition]":
        """Appends a record. The future is done as soon as the operating system has it, or raises OSError.

        A small record is written before this returns unless others are queued. Larger ones are written by a thread,
        queued ones in one batch. After an OSError other than the guard's (disk full, directory deleted, out of memory),
        later appends start a new segment.
        """
        written: asyncio.Future[RecordPosition] = asyncio.get_running_loop().create_future()
        append = _PendingAppend(json.dumps(header, separators=(",", ":")).encode(), body, written)
        if len(append.header) > _MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
            found = f"a record with {len(append.header)} bytes of header and {len(body)} of body is too large"
            most = f"at most {_MAX_HEADER_BYTES} and {MAX_BODY_BYTES} can be stored"
            written.set_exception(RecordTooLarge(f"{found}: {most}"))
            return written
        if self._flush is None and len(body) < _SMALL_BYTES and not self._sync:
            try:
                written.set_result(self._write([append])[0])
            except Exception as error:
                written.set_exception(_as_os_error(error))
            return written
        self._pending.append(append)
        if self._flush is None:
            self._flush = asyncio.create_task(self._write_pending())
        return written

    async def check_writable(self) -> None:
        """Writes and removes a temporary file. Raises OSError if nothing can be appended."""

        def try_to_write() -> None:
            self._guard()
            with tempfile.NamedTemporaryFile(dir=self._directory, prefix=_TRIAL) as file:
                file.write(bytes(_SMALL_BYTES))
                file.flush()

        await asyncio.to_thread(try_to_write)

    async def read(self, place: RecordPosition) -> LogRecord:
        """Raises ValueError if there is no complete record at `place`, OSError if the segment cannot be read."""
        return await asyncio.get_running_loop().run_in_executor(None, self._read, place)

    async def read_header(self, place: RecordPosition) -> Mapping[str, object]:
        """Returns a record's header without reading its body, and so unverified. Raises ValueError, OSError."""
        return await asyncio.get_running_loop().run_in_executor(None, self._read_header, place)

    def path(self, segment: int) -> Path:
        return self._directory / f"{segment:08d}{SUFFIX}"

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
        for path in self._directory.glob(f"*{SUFFIX}"):
            if int(path.stem) != self.current and path.stat().st_mtime < oldest:
                path.unlink()

    def renew(self, segments: Collection[int]) -> None:
        """Makes the segments as young as if their last record were new, for `delete_older_than`. Blocking."""
        for path in map(self.path, segments):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
                if self._sync:
                    with path.open("rb") as file:
                        os.fsync(file.fileno())

    async def close(self) -> None:
        """Waits for pending writes and deletions, then closes the file."""
        while self._flush is not None:
            await self._flush
        if self._deleting:
            await asyncio.wait(self._deleting)
        self._thread.shutdown()
        self._close_file()

    async def _write_pending(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            batch, self._pending = self._pending, []
            try:
                places = await loop.run_in_executor(self._thread, self._write, batch)
            except Exception as error:  # any error must reach the callers that wait, and later appends must continue
                for append in batch:
                    if not append.written.cancelled():
                        append.written.set_exception(_as_os_error(error))
                continue
            for append, place in zip(batch, places, strict=True):
                if not append.written.cancelled():
                    append.written.set_result(place)
        self._flush = None

    def _write(self, batch: list[_PendingAppend]) -> list[RecordPosition]:
        """Runs in the writer's thread, or on the event loop while that thread is idle."""
        self._guard()
        file, num_bytes = self._file, self._file_bytes
        try:
            # A batch goes into one segment, so that a batch that fails can be cut off as a whole.
            writer, places = self._file, []
            if writer is None or self._file_bytes >= self._segment_bytes:
                writer = self._open_segment()
            for append in batch:
                places.append(RecordPosition(self.current, self._file_bytes))
                checksum = zlib.crc32(append.body, zlib.crc32(append.header))
                frame = self._tag + FRAME.pack(len(append.header), len(append.body), checksum)
                for piece in (frame, append.header, append.body):
                    writer.write(piece)
                    self._file_bytes += len(piece)
            writer.flush()
            if self._sync:
                os.fsync(writer.fileno())
        except Exception:  # MemoryError, too, can occur in the middle of a record
            # The file may end in half a record, which nothing may follow. Complete records of the batch must go too,
            # since their appends are reported as failed.
            _cut_off(self._file, num_bytes if self._file is file else 0)
            self._next_segment()
            raise
        # A write that ended too late must not be acknowledged, although another process may have read it already.
        self._guard()
        return places

    def _open_segment(self) -> BufferedWriter:
        """Opens a new segment, after the present one, which is full, if there is one."""
        if self._file is not None:
            self._file.flush()
            if self._sync:
                os.fsync(self._file.fileno())
            self._next_segment()
        self._file = BufferedWriter(self.path(self.current).open("xb", buffering=0), 1 << 18)
        if self._sync:
            sync_directory(self._directory)
        self._tag = secrets.token_bytes(TAG_BYTES)
        self._file.write(MAGIC + self._tag)
        self._file_bytes = HEAD_BYTES
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
        with open_regular(self.path(place.segment)) as file:
            tag = tag_of(file)
            file.seek(place.offset)
            record = None if tag is None else read_record(file, tag)
        if record is None:
            raise ValueError(f"no whole record at {place} in {self._directory}")
        return record

    def _read_header(self, place: RecordPosition) -> Mapping[str, object]:
        with self.path(place.segment).open("rb") as file:
            if (tag := tag_of(file)) is None:
                raise ValueError(f"{file.name} is no segment")
            file.seek(place.offset)
            return read_header(file, tag)


def fence_off_writer(directory: Path) -> None:
    """Fences off a former writer: its open segment, the newest, is replaced by a copy, so that later writes reach no
    reader. Blocking. Raises OSError."""
    newest = max(directory.glob(f"*{SUFFIX}"), default=None)
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


def _cut_off(file: BufferedWriter | None, num_bytes: int) -> None:
    """Truncates what was written since, or deletes an empty file. If that fails, readers find no complete record."""
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

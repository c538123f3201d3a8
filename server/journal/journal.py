"""Journal: every accepted operation as received, and every refusal, on disk before the submit is answered.

A segment is deleted when none of its entries is held any more. `list_earlier` lists, and holds, the entries that
earlier processes left.
"""

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

from ...schemas.errors import RequestError
from ...schemas.models import ExpertFactors
from ..files.segment import Damage, LogRecord, read_segment, scan_segment
from ..files.segment_log import Guard, RecordPosition, RecordTooLarge, SegmentLog
from ..http.digests import Fingerprint
from ..logs.repeated_errors import RepeatedErrorLog

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1

SAMPLING_RULES = 2
"""Version of what a sampling request means. 1: its stops replace the model's end tokens, and JSON may contain any white
space. 2: its stops are added to the end tokens, and JSON is compact."""

_SEED_LIMIT = 1 << 31


@dataclass(frozen=True)
class Header:
    """Metadata of a journaled operation, without its body.

    kind: the request's type. run_id: of a run or a sampler. drawn: seeds drawn because the request had none.
    refused: why the operation was refused; its seq_id counts as done. reader: id of another tenant on whose behalf the
    checkpoint to load may be read. target_path: the checkpoint that is the target of a new draft model.
    feature_bytes: space reserved for captured features; None: there was no space, and nothing is captured.
    expert_factors: of a new adapter whose request leaves them open; None in what earlier versions journaled.
    sampling_rules: of a sample, see SAMPLING_RULES; 1 in what earlier versions journaled.
    digest: of the request (see http/digests.py); None in what earlier versions journaled.
    """

    kind: str
    tenant_id: str
    run_id: str
    seq_id: int
    request_id: str
    content_type: str = "application/json"
    content_encoding: str | None = None
    drawn: Mapping[str, int] = field(default_factory=dict)
    refused: str | None = None
    reader: str | None = None
    target_path: str | None = None
    feature_bytes: int | None = 0
    expert_factors: ExpertFactors | None = None
    sampling_rules: int = 1
    digest: str | None = None
    version: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> Fingerprint | None:
        return None if self.digest is None else Fingerprint(self.kind, self.digest)


def request_id_of(run_id: str, seq_id: int) -> str:
    """Returns the id by which a client retrieves the result of this request of a run or a sampler."""
    return f"{run_id}:{seq_id}"


def draw_seed() -> int:
    """Draws a seed that a request omits. It is journaled with it (Header.drawn), so that a replay repeats it."""
    return secrets.randbelow(_SEED_LIMIT)


@dataclass(frozen=True)
class JournalEntry:
    """A journaled operation; offset is that of its first byte in the segment."""

    header: Header
    body: bytes
    offset: int


@dataclass(frozen=True)
class EntryLocation:
    """Locates an entry, without its body."""

    place: RecordPosition
    header: Header


class Journal:
    """Appends entries to segments and deletes segments that are no longer needed.

    unreadable: segments of earlier processes with content that cannot be attributed to a run; these are never deleted.
    on_durable: called when an entry is durable, with the seconds that it took.
    """

    def __init__(self, directory: Path, segment_bytes: int, sync: bool = False, guard: Guard = lambda: None) -> None:
        self._segments = SegmentLog(directory, segment_bytes, sync, guard)
        self._directory = directory
        self._write_errors = RepeatedErrorLog(logger, f"writing the journal in {directory}")
        self.unreadable: set[int] = set()
        self.on_durable: Callable[[float], None] | None = None
        # The offsets of held entries, by segment.
        self._held: defaultdict[int, set[int]] = defaultdict(set)
        # The newest segment with an entry in _held; all entries of earlier segments have been added there.
        self._newest = self._segments.current

    def append(self, header: Header, body: bytes = b"") -> "asyncio.Future[RecordPosition]":
        """Returns a future that is done as soon as the entry is durable.

        It fails with RequestError: 503 if the journal cannot be written, 413 if the entry is too large to be written at
        all.
        """
        appended: asyncio.Future[RecordPosition] = asyncio.get_running_loop().create_future()
        began_at = time.monotonic()
        written = self._segments.append(vars(header), body)
        if written.done():
            self._written(appended, began_at, written)
        else:
            written.add_done_callback(partial(self._written, appended, began_at))
        return appended

    @property
    def num_held(self) -> int:
        """Returns the number of entries that a restart would need."""
        return sum(map(len, self._held.values()))

    def _written(
        self, appended: "asyncio.Future[RecordPosition]", began_at: float, written: "asyncio.Future[RecordPosition]"
    ) -> None:
        if appended.cancelled():
            return
        if error := written.exception():
            assert isinstance(error, OSError)
            if isinstance(error, RecordTooLarge):
                appended.set_exception(RequestError(f"the request cannot be journaled: {error}", 413))
                return
            self._write_errors.failed(_named(error))
            appended.set_exception(RequestError(self._unwritable(error), 503))
            return
        self._write_errors.succeeded()
        if self.on_durable is not None:
            self.on_durable(time.monotonic() - began_at)
        place = written.result()
        self._held[place.segment].add(place.offset)
        if place.segment != self._newest:
            self._newest = place.segment
            self._delete_done()
        appended.set_result(place)

    async def check_writable(self) -> str | None:
        """Returns None if operations can be accepted now, else the reason why not. Logs each change."""
        try:
            await self._segments.check_writable()
        except OSError as error:
            self._write_errors.failed(_named(error))
            return self._unwritable(error)
        self._write_errors.succeeded()
        return None

    def _unwritable(self, error: OSError) -> str:
        return f"the server's journal in {self._directory} cannot be written ({_named(error)}): free space there"

    def release(self, place: RecordPosition) -> None:
        """Marks the entry as no longer needed: its operation is done, its result durable, its effect in a snapshot.

        Releasing it again is a no-op.
        """
        self._held[place.segment].discard(place.offset)
        self._delete_done()

    async def read(self, place: RecordPosition) -> JournalEntry:
        """Raises OSError or ValueError if the entry cannot be read."""
        entry = _entry(await self._segments.read(place))
        if entry is None:
            raise ValueError(f"the journal's entry at {place} has another format version")
        return entry

    def list_earlier(self) -> list[EntryLocation]:
        """Returns the entries that earlier processes left, some of which may be done. Blocking; call it only once.

        Damaged entries are included if their header is readable; `read` fails for them. Each entry is held until it is
        released; then `delete_unneeded_segments` deletes segments without held entries.
        """
        found = [one for segment in self._segments.earlier for one in self._earlier_in(segment)]
        for one in found:
            self._held[one.place.segment].add(one.place.offset)
        return found

    def _earlier_in(self, segment: int) -> Iterator[EntryLocation]:
        path = self._segments.path(segment)
        for found in scan_segment(path):
            if isinstance(found, Damage):
                self.unreadable.add(segment)
            if (header := _header(found)) is not None:
                yield EntryLocation(RecordPosition(segment, found.offset), header)
            else:
                self.unreadable.add(segment)
                logger.error(
                    "%s: the record at byte %d has another format version, or names no run", path, found.offset
                )

    def delete_unneeded_segments(self) -> None:
        """Deletes segments without held entries; damaged ones are kept for manual recovery."""
        for segment in self._segments.earlier:
            if not self._held[segment] and segment not in self.unreadable:
                logger.info("removing %s: nothing in it is needed", self._segments.path(segment))
                self._segments.delete(segment)
                del self._held[segment]
        self._segments.earlier = []

    async def close(self) -> None:
        await self._segments.close()

    def _delete_done(self) -> None:
        done = [segment for segment, held in self._held.items() if not held and segment not in self.unreadable]
        for segment in done:
            if segment < self._newest:
                del self._held[segment]
                self._segments.delete(segment)


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """Yields the complete entries of a segment, in the order in which they were written; a torn tail ends it."""
    for record in read_segment(path):
        if (entry := _entry(record)) is None:
            logger.warning("%s has an entry of another format version at byte %d: skipped", path, record.offset)
        else:
            yield entry


def _entry(record: LogRecord) -> JournalEntry | None:
    header = _header(record)
    return None if header is None else JournalEntry(header, record.body, record.offset)


def _named(error: OSError) -> OSError:
    """Strips the file name, which differs each time, so that a repeated error reads the same."""
    return OSError(error.strerror) if error.strerror else error


def _header(found: LogRecord | Damage) -> Header | None:
    """Returns None if the record has another format version, or its header cannot be read."""
    if found.header is None or found.header.get("version") != FORMAT_VERSION:
        return None
    known = {entry.name for entry in fields(Header)}
    try:
        return Header(**{key: value for key, value in found.header.items() if key in known})  # pyright: ignore[reportArgumentType]
    except TypeError:  # damaged
        return None

"""Journal: every accepted operation as received, and every refusal, on disk before the submit is answered.

A segment goes when nothing in it is held any more. What an earlier process left is listed by `earlier`, and held.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

from ...schemas.errors import RequestError
from ..files.wal import Damage, Guard, Place, Record, RecordTooLarge, Segments, read_segment, scan_segment
from ..logs.repeated_errors import Trouble

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Header:
    """What is known of an operation beside its body.

    kind: the request's type. run_id: of a run or a sampler. drawn: seeds that the request left open.
    refused: why the operation was not accepted; its seq_id counts as done. reader: another tenant, in whose name the
    checkpoint may be read that is to be loaded. target_path: of the checkpoint that a new draft model guesses.
    feature_bytes: for which it was given room, of what it captures; None: there was none, and it captures nothing.
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
    version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Entry:
    """offset: of its first byte in its segment."""

    header: Header
    body: bytes
    offset: int


@dataclass(frozen=True)
class Journaled:
    """Where an entry is, without its body."""

    place: Place
    header: Header


class Journal:
    """unreadable: segments of earlier processes in which there is something of which nobody knows whose it is."""

    def __init__(self, directory: Path, segment_bytes: int, sync: bool = False, guard: Guard = lambda: None) -> None:
        self._segments = Segments(directory, segment_bytes, sync, guard)
        self._directory = directory
        self._trouble = Trouble(logger, f"writing the journal in {directory}")
        self.unreadable: set[int] = set()
        # Of each segment, where the entries are that are held.
        self._held: defaultdict[int, set[int]] = defaultdict(set)
        # The last segment of which an entry was counted; earlier ones have all of theirs counted.
        self._newest = self._segments.current

    def append(self, header: Header, body: bytes = b"") -> "asyncio.Future[Place]":
        """Done once the entry is durable; fails with RequestError 503, or 413 where it is too large for any disk."""
        appended: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        written = self._segments.append(vars(header), body)
        if written.done():
            self._written(appended, written)
        else:
            written.add_done_callback(partial(self._written, appended))
        return appended

    def _written(self, appended: "asyncio.Future[Place]", written: "asyncio.Future[Place]") -> None:
        if appended.cancelled():
            return
        if error := written.exception():
            assert isinstance(error, OSError)
            if isinstance(error, RecordTooLarge):
                appended.set_exception(RequestError(f"the request cannot be journaled: {error}", 413))
                return
            self._trouble.failed(_named(error))
            appended.set_exception(RequestError(self._unwritable(error), 503))
            return
        self._trouble.passed()
        place = written.result()
        self._held[place.segment].add(place.offset)
        self._newest = place.segment
        self._delete_done()
        appended.set_result(place)

    async def try_to_write(self) -> str | None:
        """Whether operations could be accepted now; else why not. The log hears of each change."""
        try:
            await self._segments.try_to_write()
        except OSError as error:
            self._trouble.failed(_named(error))
            return self._unwritable(error)
        self._trouble.passed()
        return None

    def _unwritable(self, error: OSError) -> str:
        return f"the server's journal in {self._directory} cannot be written ({_named(error)}): free space there"

    def release(self, place: Place) -> None:
        """The entry is not needed any more: its operation is done, its result durable, its effect in a snapshot.

        Again: no-op.
        """
        self._held[place.segment].discard(place.offset)
        self._delete_done()

    async def read(self, place: Place) -> Entry:
        """Raises OSError, ValueError when it cannot be read."""
        entry = _entry(await self._segments.read(place))
        if entry is None:
            raise ValueError(f"the journal's entry at {place} is of another version")
        return entry

    def earlier(self) -> list[Journaled]:
        """What earlier processes accepted or refused; blocking, to be called once. Some of it may be done.

        Of what is damaged `read` will say so. All of it is held, each entry until it is released; then `forget_earlier`
        removes what has none.
        """
        found = [one for segment in self._segments.earlier for one in self._earlier_in(segment)]
        for one in found:
            self._held[one.place.segment].add(one.place.offset)
        return found

    def _earlier_in(self, segment: int) -> Iterator[Journaled]:
        path = self._segments.path(segment)
        for found in scan_segment(path):
            if isinstance(found, Damage):
                self.unreadable.add(segment)
            if (header := _header(found)) is not None:
                yield Journaled(Place(segment, found.offset), header)
            else:
                self.unreadable.add(segment)
                logger.error(
                    "%s: what is at byte %d is of another version, or of nobody knows which run", path, found.offset
                )

    def forget_earlier(self) -> None:
        """Empty segments; those that are damaged stay for whoever can make something of them."""
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


def read_journal(path: Path) -> Iterator[Entry]:
    """The whole entries of a segment, in the order in which they were written; a torn tail ends it."""
    for record in read_segment(path):
        if (entry := _entry(record)) is None:
            logger.warning("%s has an entry of another version at byte %d: skipped", path, record.offset)
        else:
            yield entry


def _entry(record: Record) -> Entry | None:
    header = _header(record)
    return None if header is None else Entry(header, record.body, record.offset)


def _named(error: OSError) -> OSError:
    """Without the file's name, which is another one each time."""
    return OSError(error.strerror) if error.strerror else error


def _header(found: Record | Damage) -> Header | None:
    """None if it is of another version, or cannot be read."""
    if found.header is None or found.header.get("version") != FORMAT_VERSION:
        return None
    known = {entry.name for entry in fields(Header)}
    try:
        return Header(**{key: value for key, value in found.header.items() if key in known})  # pyright: ignore[reportArgumentType]
    except TypeError:  # of what is damaged
        return None

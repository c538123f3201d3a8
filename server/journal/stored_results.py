"""Reads results back from the files that futures.py writes."""

import asyncio
from collections.abc import Iterator
from typing import Any, cast

from ..files.segment import LogRecord, read_segment
from ..files.segment_log import RecordPosition, SegmentLog
from ..http.digests import Fingerprint
from ..store import OperationRecord, ResultRecord, Store

ENDED = "ended"
"""Header field of a result: the record of the operation that it ends."""
FINGERPRINT = "fingerprint"
"""Header field of a result: the fingerprint of its request."""

MAX_PER_WRITE = 500


async def store_unstored(segments: SegmentLog, store: Store) -> None:
    """Adds to the store the results that an earlier process wrote to its file, but not to the store."""
    newest = await store.results.newest()
    start = RecordPosition(-1, 0) if newest is None else RecordPosition.parse(newest.place)
    records = await asyncio.to_thread(lambda: list(_records_after(segments, start)))
    for first in range(0, len(records), MAX_PER_WRITE):
        results, operations = zip(*records[first : first + MAX_PER_WRITE], strict=True)
        await store.results.put(results, [one for one in operations if one is not None])


def _records_after(
    segments: SegmentLog, start: RecordPosition
) -> Iterator[tuple[ResultRecord, OperationRecord | None]]:
    for segment in segments.earlier:
        if segment < start.segment:
            continue
        for stored in read_segment(segments.path(segment)):
            if (segment, stored.offset) > (start.segment, start.offset) and "tenant_id" in stored.header:
                yield _read_result(RecordPosition(segment, stored.offset), stored)


def _read_result(place: RecordPosition, stored: LogRecord) -> tuple[ResultRecord, OperationRecord | None]:
    """Returns the records of a result in a segment, and of the operation that it ends."""
    columns = cast(dict[str, Any], dict(stored.header))
    ended, _ = columns.pop(ENDED, None), columns.pop(FINGERPRINT, None)
    result = ResultRecord(place=str(place), size_bytes=len(stored.body), **columns)
    return result, None if ended is None else OperationRecord(**ended)


async def stored_fingerprint(segments: SegmentLog, stored: ResultRecord) -> Fingerprint | None:
    try:
        header = await segments.read_header(RecordPosition.parse(stored.place))
    except (FileNotFoundError, ValueError):  # a poll says so
        return None
    return Fingerprint(*cast(list[str], header[FINGERPRINT])) if FINGERPRINT in header else None

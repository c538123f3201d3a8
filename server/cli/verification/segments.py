"""Checks the segments of the journal, of results and of recordings, and the rows of results."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, delete

from ...files.segment import SEGMENT_DIRECTORIES, Damage, complete_bytes, scan_segment, truncate_segment
from ...files.segment_log import RecordPosition
from ...store.database.schema import results
from .problem import UNTIL_ITS_END, Problem, Repair
from .state import VerifiedState

_OF_DAMAGED = {
    "journal": (
        "an operation is lost",
        f"it cannot be repaired: if its run must be rebuilt from it, the run is refused; start a new run from a "
        f"checkpoint then; {UNTIL_ITS_END}",
    ),
    "results": ("a result is lost", "it cannot be repaired: only a client that still polls that result is affected"),
    "recordings": (
        "the recording of a sample is lost",
        "it cannot be repaired: only stable_reinforce on that sample is affected",
    ),
}
"""(consequence, remedy) of damage within a segment, by directory."""


async def check_segments(state: VerifiedState) -> AsyncIterator[Problem]:
    for path in sorted(path for name in SEGMENT_DIRECTORIES for path in (state.live_dir / name).glob("*.segment")):
        for problem in await asyncio.to_thread(lambda path=path: list(_segment_problems(path))):
            yield problem


def _segment_problems(path: Path) -> Iterator[Problem]:
    try:
        num_bytes, size = complete_bytes(path), path.stat().st_size
        damages = [] if num_bytes is None else [one for one in scan_segment(path) if isinstance(one, Damage)]
    except FileNotFoundError:  # the server has deleted it meanwhile
        return
    if num_bytes is None:
        yield Problem(str(path), "is not a segment of this version: it is not read", "delete it, or upgrade")
        return
    what, remedy = _OF_DAMAGED[path.parent.name]
    for damage in damages:
        run_id = damage.header.get("run_id") if damage.header else None
        whose = f" (probably of {run_id})" if run_id else ""
        yield Problem(str(path), f"is damaged at byte {damage.offset}: {what}{whose}", remedy)
    if num_bytes < size:
        meaning = f"is torn: its last {size - num_bytes} bytes are not a whole record, and no request depends on them"
        done = f"the last {size - num_bytes} bytes cut off"
        repair = Repair("cuts them off", lambda: asyncio.to_thread(truncate_segment, path, num_bytes), done)
        yield Problem(str(path), meaning, "do nothing: servers ignore them", repair)


async def check_results(state: VerifiedState) -> AsyncIterator[Problem]:
    of_segments: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for row in await state.rows(results):
        place = RecordPosition.parse(row.place)
        of_segments[place.segment].append((place.offset, row.request_id))
    for segment, wanted in sorted(of_segments.items()):
        path = state.live_dir / "results" / f"{segment:08d}.segment"
        there = await asyncio.to_thread(_request_ids, path)
        lost = [request_id for offset, request_id in wanted if there.get(offset) != request_id]
        if lost:
            meaning = f"{len(lost)} results are missing from it, such as that of {lost[0]}: polls for them fail"
            drop = partial(state.store.write, partial(_drop_results, request_ids=lost))
            repair = Repair("drops their rows", drop, f"{len(lost)} rows dropped")
            yield Problem(str(path), meaning, "they cannot be restored", repair)


def _request_ids(segment: Path) -> Mapping[int, object]:
    """Returns the request ids of the segment's whole records by their offsets."""
    if not segment.exists():
        return {}
    return {one.offset: one.header.get("request_id") for one in scan_segment(segment) if not isinstance(one, Damage)}


def _drop_results(connection: Connection, request_ids: Collection[str]) -> None:
    for request_id in request_ids:
        connection.execute(delete(results).where(results.c.request_id == request_id))

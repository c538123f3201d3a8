"""Copies every published checkpoint to the configured mirror URLs, in the background. The store records the copies.

A failed copy is retried with growing pauses, across restarts, as long as its mirror is configured. Deleting a
checkpoint also deletes its copies, including those at mirrors that are no longer configured: a copy that is waiting and
whose checkpoint no longer has a row must be removed.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product

from sqlalchemy.exc import SQLAlchemyError

from ...schemas.errors import OperationError
from ...workers.scheduler.supervision.backoff import backoff
from ..files.object_store import ObjectStore, ObjectStoreError, key_of
from ..files.storage_config import CheckpointStorageConfig
from ..logs.repeated_errors import RepeatedErrorLog
from ..store import CheckpointCopyRecord, Store
from .checkpoint_files import CheckpointFiles

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 3600.0
_MAX_PER_QUERY = 500
_MAX_TRIES_ELSEWHERE = 34
"""Attempts to remove a copy at a mirror that is no longer configured: about a day's worth."""


class CheckpointMirrors:
    """Keeps one copy of each checkpoint at each mirror. An unreachable mirror does not delay the others."""

    def __init__(
        self,
        store: Store,
        object_store: ObjectStore,
        config: CheckpointStorageConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._object_store = object_store
        self._urls = tuple(url.rstrip("/") for url in config.mirrors)
        self._first_pause_seconds = config.mirror_pause_seconds
        self._clock = clock
        self._changes: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []
        # A directory is in at most one of these: a copy made while its row is deleted would be left over unrecorded.
        self._being_copied: Counter[str] = Counter()
        self._being_removed: set[str] = set()
        self._being_deleted: set[str] = set()
        # Keyed by mirror, or by the directory of an unreadable checkpoint: the reasons already logged, until it works.
        self._logged_reasons: defaultdict[str, set[str]] = defaultdict(set)

    async def start(self, files: CheckpointFiles, directories: Collection[str]) -> None:
        """Starts the background tasks. All checkpoints, whose directories these are, get the copies that they lack."""
        there, _ = await self._unfinished()
        for copy in there:
            if copy.mirror not in self._urls:  # it was never made
                await self._store.copies.delete(copy)
        if self._urls:
            await self._add_missing(sorted(directories))
        works = [lambda url=url: self._copy_due(files, url) for url in self._urls]
        self._tasks = [asyncio.create_task(self._repeat(work)) for work in (*works, self._remove_due)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def add(self, directory: str) -> None:
        """Schedules the copies of a checkpoint that was just published. Errors are logged: it stays published."""
        try:
            await self._add_missing([directory])
        except SQLAlchemyError:
            logger.exception("%s: its copies could not be scheduled; the next start schedules them", directory)
        self._notice()

    @asynccontextmanager
    async def deleting(self, directory: str) -> AsyncIterator[None]:
        """Wraps the deletion of the checkpoint's row: its copies are removed afterwards, but kept after an error."""
        # Mark the copies as waiting before the row is deleted: after a crash in between they must be found for removal.
        self._being_deleted.add(directory)
        has_copies = False
        try:
            has_copies = await self._mark_waiting(directory)
            yield
        except BaseException:
            has_copies = False
            raise
        finally:
            if not has_copies:  # else when the last copy is removed
                self._being_deleted.discard(directory)
            self._notice()

    async def move_directories(self, moves: Mapping[str, str]) -> None:
        """Moves the copies of checkpoints to new directories (old -> new), before the checkpoints' own rows change."""
        for directories in _batches(list(moves)):
            for copy in await self._store.copies.list_in(directories):
                await self._store.copies.put(replace(copy, directory=moves[copy.directory]))
            await self._store.copies.delete_in(directories)

    async def complete_copies(self, directory: str) -> list[str]:
        return [copy.url for copy in await self._store.copies.list_in([directory]) if copy.state == "copied"]

    async def _add_missing(self, directories: Sequence[str]) -> None:
        for part in _batches(directories):
            known = {(copy.directory, copy.mirror) for copy in await self._store.copies.list_in(part)}
            for directory, url in product(part, self._urls):
                if (directory, url) not in known:
                    place = f"{url}/{key_of(directory)}"
                    waiting = CheckpointCopyRecord(directory, url, place, "waiting", None, 0, self._clock())
                    await self._store.copies.put(waiting)

    async def _mark_waiting(self, directory: str) -> bool:
        """Marks all copies of the checkpoint as waiting. True if it has any."""
        copies = await self._store.copies.list_in([directory])
        for copy in copies:
            await self._store.copies.put(replace(copy, state="waiting", error=None, num_tries=0))
        return bool(copies)

    def _notice(self) -> None:
        for change in self._changes:
            change.set()

    async def _repeat(self, work: Callable[[], Awaitable[float | None]]) -> None:
        """Runs `work` for ever. It returns the seconds until more work is due, or None if only a change brings more."""
        change, errors = asyncio.Event(), RepeatedErrorLog(logger, "copying checkpoints to mirrors")
        self._changes.append(change)
        while True:
            change.clear()
            try:
                seconds = await work()
            except SQLAlchemyError as error:  # possibly temporary, such as a full disk
                errors.failed(error)
                seconds = self._first_pause_seconds
            else:
                errors.succeeded()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(change.wait(), seconds)

    async def _unfinished(self) -> tuple[list[CheckpointCopyRecord], list[CheckpointCopyRecord]]:
        """Returns the unfinished copies of existing checkpoints, and those of deleted ones."""
        unfinished = await self._store.copies.list_unfinished()
        # Read after the copies, since a checkpoint's row is inserted before the rows of its copies.
        published = await self._store.checkpoints.list_directories()
        there = [copy for copy in unfinished if copy.directory in published]
        return there, [copy for copy in unfinished if copy.directory not in published]

    async def _copy_due(self, files: CheckpointFiles, mirror: str) -> float | None:
        there, _ = await self._unfinished()
        after = []
        for copy in there:
            if copy.mirror == mirror:
                after.append(copy if self._seconds_until(copy) > 0 else await self._copy(files, copy))
        unfinished = [copy for copy in after if copy is not None and copy.state != "copied"]
        return min((self._seconds_until(copy) for copy in unfinished), default=None)

    async def _copy(self, files: CheckpointFiles, copy: CheckpointCopyRecord) -> CheckpointCopyRecord | None:
        """Makes the copy and returns its new record, or None if it is no longer wanted."""
        if copy.directory in self._being_removed | self._being_deleted:
            return None
        self._being_copied[copy.directory] += 1
        try:
            if copy.mirror not in {known.mirror for known in await self._store.copies.list_in([copy.directory])}:
                return None
            after = await self._try_copy(files, copy)
            is_there = copy.directory in await self._store.checkpoints.list_directories()
            if not is_there or copy.directory in self._being_deleted:
                return None
            await self._store.copies.put(after)
            return after
        finally:
            self._being_copied -= Counter((copy.directory,))

    async def _try_copy(self, files: CheckpointFiles, copy: CheckpointCopyRecord) -> CheckpointCopyRecord:
        try:
            async with files.reading(copy.directory) as here:
                is_complete = False
                with contextlib.suppress(ObjectStoreError):
                    is_complete = await self._object_store.holds(copy.url, here)
                if not is_complete:
                    await self._object_store.upload(here, copy.url)
        except (ObjectStoreError, OperationError, OSError, ValueError) as error:
            return self._failed(copy, error)
        self._logged_reasons.pop(copy.directory, None)
        if self._logged_reasons.pop(copy.mirror, None):
            logger.info("%s: copying to this mirror works again", copy.mirror)
        return replace(copy, state="copied", error=None, num_tries=copy.num_tries + 1, updated_at=self._clock())

    async def _remove_due(self) -> float | None:
        _, gone = await self._unfinished()
        pauses = []
        for directory in {copy.directory for copy in gone}:
            if self._being_copied[directory]:
                pauses.append(self._first_pause_seconds)
            else:
                pauses.append(await self._remove(directory))
        return min((seconds for seconds in pauses if seconds > 0), default=None)

    async def _remove(self, directory: str) -> float:
        """Removes all copies of one checkpoint if they are due. Returns the seconds until the next try, 0 for none."""
        self._being_removed.add(directory)
        try:
            copies = await self._store.copies.list_in([directory])
            seconds = max(map(self._seconds_until, copies), default=0.0)
            return seconds if seconds > 0 else await self._remove_now(directory, copies)
        finally:
            self._being_removed.discard(directory)

    async def _remove_now(self, directory: str, copies: Sequence[CheckpointCopyRecord]) -> float:
        failed = []
        for copy in copies:
            try:
                await self._object_store.remove(copy.url)
            except ObjectStoreError as error:
                if copy.mirror not in self._urls and copy.num_tries >= _MAX_TRIES_ELSEWHERE:
                    logger.warning("%s; giving up, since this mirror is no longer configured: delete it by hand", error)
                    continue
                failed.append(self._failed(copy, error))
                await self._store.copies.put(failed[-1])
        if not failed:
            await self._store.copies.delete_in([directory])
            self._being_deleted.discard(directory)
        return max(map(self._seconds_until, failed), default=0.0)

    def _failed(self, copy: CheckpointCopyRecord, error: Exception) -> CheckpointCopyRecord:
        """Returns the record of the failed copy, and logs why it failed, once per reason."""
        cause, reason = copy.directory, str(error)
        if isinstance(error, ObjectStoreError):
            cause, reason = copy.mirror, error.reason.replace(key_of(copy.url), "...")
        if reason not in self._logged_reasons[cause]:
            self._logged_reasons[cause].add(reason)
            words = "%s: copying failed (%s); retrying with growing pauses, logged again only for a new reason"
            logger.warning(words, cause, reason)
        num_tries = copy.num_tries + 1
        return replace(copy, state="failed", error=str(error), num_tries=num_tries, updated_at=self._clock())

    def _seconds_until(self, copy: CheckpointCopyRecord) -> float:
        """Returns the seconds until the copy's next try; at most 0 if it is due."""
        if copy.state == "waiting":
            return 0.0
        pause = backoff(copy.num_tries, self._first_pause_seconds, _LONGEST_PAUSE_SECONDS)
        return copy.updated_at + pause - self._clock()


def _batches(directories: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yields the directories in parts that are small enough for one query."""
    for first in range(0, len(directories), _MAX_PER_QUERY):
        yield directories[first : first + _MAX_PER_QUERY]

"""Mirror: copies of every published checkpoint at other URLs, made in the background and known to the store.

A copy that fails is tried again, ever less often, over restarts, for as long as its mirror is named. What is deleted
goes from its mirrors, too, named or not: a copy that waits and whose checkpoint is not there any more is one to be
removed.
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
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from ...schemas.errors import OperationError
from ..files.config import PlaceConfig
from ..files.manifest import read_manifest
from ..files.object_store import PlaceError, Places, key_of
from ..logs.repeated_errors import Trouble
from ..store import CheckpointCopyRecord, Store
from .files import CheckpointFiles

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 3600.0
_MOST_PER_QUERY = 500
_MOST_TRIES_ELSEWHERE = 34
"""To remove what is at a mirror that is not named any more: a day."""


class Mirror:
    """config.mirrors: each is worked on by itself, so that one that is away holds up no other."""

    def __init__(
        self, store: Store, places: Places, config: PlaceConfig, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._places = places
        self._urls = tuple(url.rstrip("/") for url in config.mirrors)
        self._first_pause_seconds = config.mirror_pause_seconds
        self._clock = clock
        self._changes: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []
        # None is in two of them: a copy that is made while its row goes would stay where nobody knows of it.
        self._being_copied: Counter[str] = Counter()
        self._being_removed: set[str] = set()
        self._forgotten: set[str] = set()
        # Of a mirror, or of a checkpoint that cannot be read: the reasons that are in the log, until it goes again.
        self._told: defaultdict[str, set[str]] = defaultdict(set)

    async def start(self, files: CheckpointFiles, directories: Collection[str]) -> None:
        """directories: of all checkpoints; those that have no copy yet get one."""
        await self._forget_others()
        if self._urls:
            await self._add_missing(sorted(directories))
        works = [lambda url=url: self._copy_due(files, url) for url in self._urls]
        self._tasks = [asyncio.create_task(self._repeat(work)) for work in (*works, self._remove_due)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def add(self, directory: str) -> None:
        """A checkpoint that is published. It is, whatever becomes of its copies."""
        try:
            await self._add_missing([directory])
        except SQLAlchemyError:
            logger.exception("%s gets its copies at the next start", directory)
        self._notice()

    @asynccontextmanager
    async def forgetting(self, directory: str) -> AsyncIterator[None]:
        """To delete the checkpoint's row in. Its copies go after that, and stay if the row does."""
        # From here on they wait, whatever is under way: a crash behind the row must find them so.
        self._forgotten.add(directory)
        has_copies = False
        try:
            has_copies = await self._let_wait(directory)
            yield
        except BaseException:
            has_copies = False
            raise
        finally:
            if not has_copies:  # else with the last of them
                self._forgotten.discard(directory)
            self._notice()

    async def follow(self, moves: Mapping[str, str]) -> None:
        """Old -> new directory of checkpoints whose rows are about to say so."""
        for directories in _parts(list(moves)):
            for copy in await self._store.list_copies(directories):
                await self._store.put_copy(replace(copy, directory=moves[copy.directory]))
            await self._store.delete_copies(directories)

    async def copies(self, directory: str) -> list[str]:
        """The URLs of those that are complete."""
        return [copy.url for copy in await self._store.list_copies([directory]) if copy.state == "copied"]

    async def _add_missing(self, directories: Sequence[str]) -> None:
        for part in _parts(directories):
            known = {(copy.directory, copy.mirror) for copy in await self._store.list_copies(part)}
            for directory, url in product(part, self._urls):
                if (directory, url) not in known:
                    place = f"{url}/{key_of(directory)}"
                    waiting = CheckpointCopyRecord(directory, url, place, "waiting", None, 0, self._clock())
                    await self._store.put_copy(waiting)

    async def _forget_others(self) -> None:
        """What was never copied to a mirror that is not named any more."""
        there, _ = await self._unfinished()
        for copy in there:
            if copy.mirror not in self._urls:
                await self._store.delete_copy(copy)

    async def _let_wait(self, directory: str) -> bool:
        """Whether there are any."""
        copies = await self._store.list_copies([directory])
        for copy in copies:
            await self._store.put_copy(replace(copy, state="waiting", error=None, num_tries=0))
        return bool(copies)

    def _notice(self) -> None:
        for change in self._changes:
            change.set()

    async def _repeat(self, work: Callable[[], Awaitable[float | None]]) -> None:
        """work: answers in how many seconds there is more of it, None when only a change brings more."""
        change, trouble = asyncio.Event(), Trouble(logger, "keeping up the copies of checkpoints")
        self._changes.append(change)
        while True:
            change.clear()
            try:
                seconds = await work()
            except SQLAlchemyError as error:  # a full disk, say: it may go better next time
                trouble.failed(error)
                seconds = self._first_pause_seconds
            else:
                trouble.passed()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(change.wait(), seconds)

    async def _unfinished(self) -> tuple[list[CheckpointCopyRecord], list[CheckpointCopyRecord]]:
        """Of checkpoints that are there, and of those that are gone."""
        unfinished = await self._store.list_unfinished_copies()
        # Behind that, since a checkpoint's row comes before those of its copies.
        published = await self._store.list_checkpoint_directories()
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
        """How it stands then; None where it is not to be made any more."""
        if copy.directory in self._being_removed | self._forgotten:
            return None
        self._being_copied[copy.directory] += 1
        try:
            if copy.mirror not in {known.mirror for known in await self._store.list_copies([copy.directory])}:
                return None
            after = await self._copied(files, copy)
            is_there = copy.directory in await self._store.list_checkpoint_directories()
            if not is_there or copy.directory in self._forgotten:
                return None
            await self._store.put_copy(after)
            return after
        finally:
            self._being_copied -= Counter((copy.directory,))

    async def _copied(self, files: CheckpointFiles, copy: CheckpointCopyRecord) -> CheckpointCopyRecord:
        try:
            async with files.reading(copy.directory) as here:
                if not await self._is_there(copy.url, here):
                    await self._places.upload(here, copy.url)
        except (PlaceError, OperationError, OSError, ValueError) as error:
            return self._failed(copy, error)
        self._told.pop(copy.directory, None)
        if self._told.pop(copy.mirror, None):
            logger.info("%s: copies are made there again", copy.mirror)
        return replace(copy, state="copied", error=None, num_tries=copy.num_tries + 1, updated_at=self._clock())

    async def _is_there(self, url: str, here: Path) -> bool:
        try:
            return await self._places.manifest(url) == await asyncio.to_thread(read_manifest, here)
        except PlaceError:
            return False

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
        """All of one checkpoint's, when they are due; in how many seconds to try again, 0 when they are gone."""
        self._being_removed.add(directory)
        try:
            copies = await self._store.list_copies([directory])
            seconds = max(map(self._seconds_until, copies), default=0.0)
            return seconds if seconds > 0 else await self._remove_now(directory, copies)
        finally:
            self._being_removed.discard(directory)

    async def _remove_now(self, directory: str, copies: Sequence[CheckpointCopyRecord]) -> float:
        failed = []
        for copy in copies:
            try:
                await self._places.remove(copy.url)
            except PlaceError as error:
                if copy.mirror not in self._urls and copy.num_tries >= _MOST_TRIES_ELSEWHERE:
                    logger.warning("%s; it stays there, since that is no mirror any more: delete it by hand", error)
                    continue
                failed.append(self._failed(copy, error))
                await self._store.put_copy(failed[-1])
        if not failed:
            await self._store.delete_copies([directory])
            self._forgotten.discard(directory)
        return max(map(self._seconds_until, failed), default=0.0)

    def _failed(self, copy: CheckpointCopyRecord, error: Exception) -> CheckpointCopyRecord:
        failed = replace(copy, state="failed", error=str(error), num_tries=copy.num_tries + 1, updated_at=self._clock())
        self._tell(copy, error)
        return failed

    def _tell(self, copy: CheckpointCopyRecord, error: Exception) -> None:
        """Why copies fail, once for all that fail for the same reason."""
        about, reason = copy.directory, str(error)
        if isinstance(error, PlaceError):
            about, reason = copy.mirror, error.reason.replace(key_of(copy.url), "...")
        if reason not in self._told[about]:
            self._told[about].add(reason)
            logger.warning(
                "%s: no copies (%s); tried again, ever less often, and told once more if that changes", about, reason
            )

    def _seconds_until(self, copy: CheckpointCopyRecord) -> float:
        """Its next try; not above 0 when that is due."""
        if copy.state == "waiting":
            return 0.0
        pause = min(self._first_pause_seconds * 2 ** (copy.num_tries - 1), _LONGEST_PAUSE_SECONDS)
        return copy.updated_at + pause - self._clock()


def _parts(directories: Sequence[str]) -> Iterator[Sequence[str]]:
    """As many as a query may name."""
    for first in range(0, len(directories), _MOST_PER_QUERY):
        yield directories[first : first + _MOST_PER_QUERY]

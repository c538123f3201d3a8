"""`trainhouse verify`: checks everything below a state directory, reports what is damaged, and repairs what is safe to.

While a server runs, it only checks, twice, and reports the problems found both times: files change in between.
"""

import asyncio
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, Table, delete, select
from sqlalchemy.exc import DatabaseError

from ...schemas.errors import OperationError
from ..checkpoints.checkpoint_files import CheckpointFiles
from ..checkpoints.leftovers import UNLISTED_DAYS, has_complete_files
from ..checkpoints.lost_rows import path_of_lost_row, restore_row
from ..checkpoints.mirror import CheckpointMirrors
from ..config.knob_values import is_url
from ..files.directories import STAGING, directory_name
from ..files.manifest import MANIFEST, ManifestMismatch, check_directory, read_manifest
from ..files.object_store import ObjectStore, ObjectStoreError
from ..files.segment import DamagedRange, complete_bytes, scan_segment, truncate_segment
from ..files.storage_config import CheckpointStorageConfig
from ..files.wal import RecordPosition
from ..journal.journal import read_journal
from ..replication.leases import LIVE_STATE, live_directory
from ..replication.state_lock import StartError, locked_state_directory
from ..sampling.ephemeral_weights import EphemeralWeights
from ..store import CheckpointCopyRecord, RunRecord, Store
from ..store.sqlite import DAMAGE_REMEDY
from ..store.tables import checkpoint_copies, checkpoints, results

SEGMENTED = ("journal", "results", "recordings")
"""Directories that hold segments."""

_MOVING_SECONDS = 1.0
_UNKNOWN = "no row of this database refers to it: it belongs to another database, or is left over"
_BY_HAND = "delete it there by hand, unless it belongs to another database"
_UNTIL_ITS_END = "this is reported until its session ends"
_NEW_RUN = f"start a new run from a checkpoint of it; {_UNTIL_ITS_END}"
_OF_DAMAGED = {
    "journal": (
        "an operation is lost",
        f"it cannot be repaired: if its run must be rebuilt from it, the run is refused; start a new run from a "
        f"checkpoint then; {_UNTIL_ITS_END}",
    ),
    "results": ("a result is lost", "it cannot be repaired: only a client that still polls that result is affected"),
    "recordings": (
        "the recording of a sample is lost",
        "it cannot be repaired: only stable_reinforce on that sample is affected",
    ),
}
"""(consequence, remedy) of damage within a segment, by directory."""


@dataclass(frozen=True)
class Repair:
    """A repair that --repair makes.

    does: shown before the repair, as in "run with --repair, which ...".
    work: makes the repair and returns what it did; raises OperationError, ObjectStoreError or OSError if it cannot.
    """

    does: str
    work: Callable[[], Awaitable[str]]


@dataclass(frozen=True)
class Problem:
    """A problem that verify found.

    path: of a checkpoint, a file or a directory, or a URL.
    meaning: what is wrong, and the consequence.
    remedy: what to do if there is no repair, or it fails.
    """

    path: str
    meaning: str
    remedy: str
    repair: Repair | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.meaning}"


@contextmanager
def lock_to_verify(state_dir: Path, repair: bool) -> Iterator[bool]:
    """Yields True if a server runs on the state directory; otherwise locks it, so that none can start meanwhile.

    Raises:
        StartError: a server runs, and `repair` is True.
        ValueError: the state directory does not exist.
    """
    if not state_dir.is_dir():
        raise ValueError(f"there is no state directory {state_dir}: name it with --state-dir")
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_state_directory(state_dir))
        except StartError:
            if repair:
                raise
            yield True
        else:
            yield False


async def verify(
    store: Store,
    state_dir: Path,
    config: CheckpointStorageConfig,
    is_running: bool,
    repair: bool,
    say: Callable[[str], None],
) -> int:
    """Says each problem in one line; returns how many are left.

    Args:
        is_running: a server uses the state directory.
    Raises:
        ValueError: `repair` is True, but a server uses the state directory, or it belongs to another database.
    """
    try:
        if repair:
            await _check_epoch(store, state_dir)
        holder = None if is_running else await _holder(store)
    except DatabaseError as error:
        say(f"database: {error.orig}; {DAMAGE_REMEDY}")
        return 1
    if holder is not None:
        if repair:
            raise ValueError(f"the server at {holder} uses this state directory: stop all servers on it first")
        is_running = True
    async with Verification.of(store, state_dir, config, is_running) as verification:
        problems = await verification.problems()
        if is_running and problems:
            await asyncio.sleep(_MOVING_SECONDS)
            again = {str(problem) for problem in await verification.problems()}
            problems = [problem for problem in problems if str(problem) in again]
        num_left = 0
        for problem in problems:
            done = await _try_repair(problem) if repair else None
            num_left += done is None
            then = f"repaired: {done}" if done else _advice(problem, is_running, repair)
            say(f"{problem}; {then}")
        is_all = "all is whole" if verification.has_all_copies else "all that exists is whole"
        say(f"{verification.counts}: {_num(num_left, 'problem') if num_left else is_all}")
        return num_left


async def _check_epoch(store: Store, state_dir: Path) -> None:
    """Makes the check that a server makes when it takes the live state.

    Raises ValueError if the state directory belongs to another database: all its files would seem to be left over.
    """
    live = live_directory(state_dir)
    epochs = [lease.epoch for lease in await store.leases.list_all() if lease.base_model == LIVE_STATE]
    known = max(epochs, default=0)
    if live != state_dir and int(live.name.removeprefix("live-")) > known:
        raise ValueError(
            f"state directory {state_dir} has {live.name}, but the database is at epoch {known}: it belongs to another "
            "database; name a matching pair with --state-dir and --database-url"
        )


async def _holder(store: Store) -> str | None:
    """Returns the URL of the server that holds a lease of this database, if any."""
    return next((lease.url for lease in await store.leases.list_all() if lease.expires_at > time.time()), None)


async def _try_repair(problem: Problem) -> str | None:
    """Returns what the repair did, or None if there is none or it failed."""
    if problem.repair is None:
        return None
    try:
        return await problem.repair.work()
    except (OperationError, ObjectStoreError, OSError, ManifestMismatch):
        return None


def _advice(problem: Problem, is_running: bool, was_tried: bool) -> str:
    if problem.repair is None or was_tried:
        return problem.remedy
    return f"{'stop the server and ' if is_running else ''}run with --repair, which {problem.repair.does}"


class Verification:
    """Runs the checks, each of which yields the problems that it finds."""

    def __init__(
        self, store: Store, state_dir: Path, places: ObjectStore, config: CheckpointStorageConfig, is_running: bool
    ) -> None:
        self._store = store
        self._state_dir = state_dir.absolute()
        self._live_dir = live_directory(self._state_dir)
        self._places = places
        self._config = config
        self._is_running = is_running
        self._mirror = CheckpointMirrors(store, places, config)
        self._files = CheckpointFiles(state_dir, config, places, self._copies_of)
        self._moves: Mapping[str, str] = {}
        self._runs: set[str] = set()
        self.counts = ""
        self.has_all_copies = True

    @classmethod
    @asynccontextmanager
    async def of(
        cls, store: Store, state_dir: Path, config: CheckpointStorageConfig, is_running: bool
    ) -> "AsyncIterator[Verification]":
        places = ObjectStore(())
        try:
            yield cls(store, state_dir, places, config, is_running)
        finally:
            places.close()

    async def problems(self) -> list[Problem]:
        if damages := [problem async for problem in self._database()]:
            self.counts = "the files were not checked, because the database's records of them cannot be trusted"
            return damages
        self._moves = await self._files.follow_moved_root(await self._store.checkpoints.list_directories())
        self._runs = {directory_name(run_id) for run_id in await self._store.runs.list_ids()}
        walks = (
            self._checkpoints(),
            self._copies(),
            self._snapshots(),
            self._loaded(),
            self._segments(),
            self._results(),
            self._ephemeral(),
            *(() if self._is_running else (self._leftovers(), self._leftovers_at_url())),
        )
        found = [problem for walk in walks async for problem in walk]
        self.counts = await self._counted()
        return found

    async def _database(self) -> AsyncIterator[Problem]:
        def statements(connection: Connection) -> Sequence[str]:
            is_sqlite = connection.dialect.name == "sqlite"
            return connection.exec_driver_sql("PRAGMA integrity_check").scalars().all() if is_sqlite else ["ok"]

        try:
            lines = await self._store.read(statements)
        except DatabaseError as error:
            lines = [str(error.orig)]
        for line in lines:
            if line != "ok":
                yield Problem("database", " ".join(line.split()), DAMAGE_REMEDY)

    # Checkpoints

    async def _checkpoints(self) -> AsyncIterator[Problem]:
        for row in await self._rows(checkpoints):
            directory = self._moves.get(row.directory, row.directory)
            path = f"tinker://{row.run_id}/{row.kind}/{row.name}"
            try:
                if is_url(directory):
                    about = await self._places.check(directory)
                else:
                    await asyncio.to_thread(check_directory, Path(directory))
                    about = await asyncio.to_thread(read_manifest, Path(directory))
            except (ObjectStoreError, ManifestMismatch) as error:
                yield await self._damaged(path, directory, error.reason)
            else:
                if about.get("tinker_path") != path:
                    meaning = f"the files in {directory} are those of {about.get('tinker_path')}"
                    yield Problem(path, meaning, f"restore its files from a backup, or {_deletion(path)}")

    async def _damaged(self, path: str, directory: str, reason: str) -> Problem:
        copies = await self._copies_of(directory)
        repair = Repair("restores it from its mirror", lambda: self._restore(directory)) if copies else None
        lacks = "no mirror has a whole copy" if copies else "it has no copy at a mirror"
        remedy = f"{lacks}: restore {directory} from a backup, or {_deletion(path)}"
        return Problem(path, f"is damaged: {reason}", remedy, repair)

    async def _copies_of(self, directory: str) -> list[str]:
        """Returns the copies of the checkpoint at its present directory, which its row may not name yet."""
        former = {new: old for old, new in self._moves.items()}
        return await self._mirror.complete_copies(former.get(directory, directory))

    async def _restore(self, directory: str) -> str:
        async with self._files.reading(directory) as here:
            if is_url(directory):
                await self._places.upload(here, directory)
        return "restored from its mirror"

    async def _copies(self) -> AsyncIterator[Problem]:
        paths = {row.directory: f"tinker://{row.run_id}/{row.kind}/{row.name}" for row in await self._rows(checkpoints)}
        for row in await self._rows(checkpoint_copies):
            if row.state != "copied":
                continue
            try:
                await self._places.check(row.url)
            except ObjectStoreError as error:
                waiting = replace(CheckpointCopyRecord(**row._mapping), state="waiting", num_tries=0)
                meaning = f"the copy of {paths.get(row.directory, row.directory)} is damaged: {error.reason}"
                repair = Repair("has it copied again", lambda waiting=waiting: self._copy_again(waiting))
                yield Problem(row.url, meaning, "delete it there, and run with --repair", repair)

    async def _copy_again(self, waiting: CheckpointCopyRecord) -> str:
        await self._store.copies.put(waiting)
        return "the server will copy it again"

    async def _leftovers(self) -> AsyncIterator[Problem]:
        rows = await self._store.checkpoints.list_directories()
        published = {self._moves.get(directory, directory) for directory in rows}
        live = {directory_name(run.run_id) for run in await self._live_runs()}
        adapters = {directory_name(one) for one in await self._live_adapters()}
        root = self._live_dir
        for path in sorted((*self._files.local_root.glob("*/*/*"), *self._state_dir.glob("staging/*"))):
            is_ours = self._is_ours(path) and str(path) not in published
            if is_ours and not path.name.startswith(STAGING) and await asyncio.to_thread(has_complete_files, path):
                yield await self._unlisted(path)
            elif path.name.startswith(STAGING) or is_ours:
                yield _leftover(path, "a checkpoint that was never published, or that was deleted")
        for path in sorted(path for name in ("snapshots", "loaded") for path in _of_runs(root / name)):
            if path.name.startswith(STAGING) or path.name not in live:
                yield _leftover(path, "files of a run that has ended, or that were never finished")
        for path in sorted(root.glob("ephemeral/*")):
            if path.name not in adapters:
                yield _leftover(path, "the weights of a sampler that has ended, or that were never finished")

    def _is_ours(self, path: Path) -> bool:
        """True if the directory belongs to a run of this database, or, by its manifest, to one that it once had."""
        if path.parent.parent.name in self._runs:
            return True
        return self._files.is_ours_alone(path) and has_complete_files(path) and "tenant_id" in read_manifest(path)

    async def _unlisted(self, path: Path) -> Problem:
        when = f"servers remove it {UNLISTED_DAYS} days after one first reported it"
        remedy = f"delete it by hand, or leave it: {when}"
        about = await asyncio.to_thread(read_manifest, path)
        lost = await path_of_lost_row(self._store, str(path), about, self._files.is_ours_alone(path))
        if lost is None:
            return Problem(str(path), f"is whole, but {_UNKNOWN}", remedy)
        return self._lost_row(str(path), about, lost, remedy)

    def _lost_row(self, directory: str, about: Mapping[str, Any], path: str, remedy: str) -> Problem:
        repair = Repair("restores its row", lambda: self._take_back(directory, about))
        return Problem(directory, f"is whole, but the database has no row of {path}", remedy, repair)

    async def _take_back(self, directory: str, about: Mapping[str, Any]) -> str:
        if is_url(directory):
            about = await self._places.check(directory)
        else:
            await asyncio.to_thread(check_directory, Path(directory))
        return f"{await restore_row(self._store, directory, about)} has its row again"

    async def _leftovers_at_url(self) -> AsyncIterator[Problem]:
        root = self._config.checkpoints
        if root is None or not is_url(root):
            return
        published = await self._store.checkpoints.list_directories()
        try:
            found = await self._places.list(root)
        except ObjectStoreError as error:
            yield Problem(root, f"cannot be listed: {error.reason}", "check whether it can be reached from here")
            return
        for key, names in found.items():
            url = f"{root.rstrip('/')}/{key}"
            if url in published:
                continue
            if MANIFEST in names:
                yield await self._unlisted_at(url)
            elif key.partition("/")[0] not in self._runs:
                yield Problem(url, _UNKNOWN, _BY_HAND)
            else:
                repair = Repair("removes it", lambda url=url: self._remove_at(url))
                yield Problem(url, "left over: never published, or deleted", "delete it there by hand", repair)

    async def _unlisted_at(self, url: str) -> Problem:
        try:
            about = await self._places.check(url)
        except ObjectStoreError as error:
            return Problem(url, f"{_UNKNOWN}, and damaged: {error.reason}", _BY_HAND)
        lost = await path_of_lost_row(self._store, url, about, is_ours_alone=False)
        return Problem(url, _UNKNOWN, _BY_HAND) if lost is None else self._lost_row(url, about, lost, _BY_HAND)

    async def _remove_at(self, url: str) -> str:
        await self._places.remove(url)
        return "removed"

    # Snapshots, loaded checkpoints, ephemeral weights

    async def _snapshots(self) -> AsyncIterator[Problem]:
        begun = await asyncio.to_thread(_runs_from_their_beginning, self._live_dir / "journal")
        for run in await self._live_runs():
            directory = self._live_dir / "snapshots" / directory_name(run.run_id)
            whole, damaged = await asyncio.to_thread(_check_all, sorted(directory.glob("[0-9]*")))
            for path, error in damaged.items():
                can_go = bool(whole) or run.run_id in begun
                meaning = f"a snapshot of {run.run_id} is damaged: {error.reason}"
                repair = Repair("removes it", lambda path=path: _remove(path)) if can_go else None
                yield Problem(str(path), meaning, "delete it by hand" if can_go else _NEW_RUN, repair)
            if not whole and run.run_id not in begun:
                meaning = f"{run.run_id} cannot be rebuilt: neither a whole snapshot nor its first operation is left"
                yield Problem(str(directory), meaning, _NEW_RUN)

    async def _loaded(self) -> AsyncIterator[Problem]:
        for run in await self._live_runs():
            directory = self._live_dir / "loaded" / directory_name(run.run_id)
            _, damaged = await asyncio.to_thread(_check_all, sorted(directory.glob("[0-9]*")))
            for path, error in damaged.items():
                meaning = f"a checkpoint that {run.run_id} has loaded is damaged: {error.reason}"
                yield Problem(str(path), meaning, f"do nothing if the run has a whole snapshot, else {_NEW_RUN}")

    async def _ephemeral(self) -> AsyncIterator[Problem]:
        weights = EphemeralWeights(self._live_dir / "ephemeral")
        for adapter_id in await self._live_adapters():
            if not weights.has(adapter_id):
                remedy = f"they cannot be restored: save its run's weights for a new sampler; {_UNTIL_ITS_END}"
                lost = str(weights.directory(adapter_id))
                yield Problem(lost, "the weights of a sampler are lost: its requests are answered 410", remedy)

    async def _live_runs(self) -> list[RunRecord]:
        open_sessions = await self._store.sessions.list_open()
        return [run for one in open_sessions for run in await self._store.runs.list_of_session(one.session_id)]

    async def _live_adapters(self) -> set[str]:
        samplers = await self._store.samplers.list_open()
        return {one.adapter_id for one in samplers if one.is_ephemeral and one.adapter_id}

    # Segments

    async def _segments(self) -> AsyncIterator[Problem]:
        for path in sorted(path for name in SEGMENTED for path in (self._live_dir / name).glob("*.segment")):
            for problem in await asyncio.to_thread(lambda path=path: list(_segment_problems(path))):
                yield problem

    async def _results(self) -> AsyncIterator[Problem]:
        of_segments: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for row in await self._rows(results):
            place = RecordPosition.parse(row.place)
            of_segments[place.segment].append((place.offset, row.request_id))
        for segment, wanted in sorted(of_segments.items()):
            path = self._live_dir / "results" / f"{segment:08d}.segment"
            there = await asyncio.to_thread(_request_ids, path)
            lost = [request_id for offset, request_id in wanted if there.get(offset) != request_id]
            if lost:
                meaning = f"{len(lost)} results are missing from it, such as that of {lost[0]}: polls for them fail"
                repair = Repair("drops their rows", lambda lost=lost: self._drop_results(lost))
                yield Problem(str(path), meaning, "they cannot be restored", repair)

    async def _drop_results(self, request_ids: Collection[str]) -> str:
        def statements(connection: Connection) -> None:
            for request_id in request_ids:
                connection.execute(delete(results).where(results.c.request_id == request_id))

        await self._store.write(statements)
        return f"{len(request_ids)} rows dropped"

    async def _counted(self) -> str:
        num_segments = sum(len(list((self._live_dir / name).glob("*.segment"))) for name in SEGMENTED)
        num_snapshots = len(list(self._live_dir.glob("snapshots/*/[0-9]*")))
        copies = [row.state for row in await self._rows(checkpoint_copies)]
        missing = {state: copies.count(state) for state in ("waiting", "failed") if state in copies}
        self.has_all_copies = not missing
        not_made = ", ".join(f"{number} {state}" for state, number in missing.items())
        return ", ".join(
            (
                _num(len(await self._rows(checkpoints)), "checkpoint"),
                _num(len(copies), "copy", "copies") + (f" ({not_made})" if missing else ""),
                _num(len(await self._rows(results)), "result"),
                _num(num_snapshots, "snapshot"),
                _num(num_segments, "segment"),
            )
        )

    async def _rows(self, table: Table) -> Sequence[Row]:
        return await self._store.read(lambda connection: connection.execute(select(table)).all())


def _num(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def _leftover(path: Path, what: str) -> Problem:
    return Problem(str(path), f"left over: {what}", "delete it by hand", Repair("removes it", lambda: _remove(path)))


def _deletion(path: str) -> str:
    return f"delete it: tinker checkpoint delete {path}"


async def _remove(path: Path) -> str:
    await asyncio.to_thread(shutil.rmtree, path)
    return "removed"


def _of_runs(root: Path) -> list[Path]:
    """Returns the directories of runs and the staging directories in them."""
    return [*root.glob("*"), *root.glob(f"*/{STAGING}*")]


def _check_all(directories: Sequence[Path]) -> tuple[list[Path], dict[Path, ManifestMismatch]]:
    """Returns the directories that match their manifests, and the error of each other one."""
    damaged = {}
    for directory in directories:
        try:
            check_directory(directory)
        except ManifestMismatch as error:
            damaged[directory] = error
    return [directory for directory in directories if directory not in damaged], damaged


def _runs_from_their_beginning(journal: Path) -> set[str]:
    """Returns the ids of the runs whose first operation is in the journal."""
    entries = (entry for path in sorted(journal.glob("*.segment")) for entry in read_journal(path))
    return {entry.header.run_id for entry in entries if entry.header.kind.startswith("create_model")}


def _request_ids(segment: Path) -> Mapping[int, object]:
    """Returns the request ids of the segment's whole records by their offsets."""
    if not segment.exists():
        return {}
    return {
        one.offset: one.header.get("request_id") for one in scan_segment(segment) if not isinstance(one, DamagedRange)
    }


def _segment_problems(path: Path) -> Iterator[Problem]:
    try:
        num_bytes, size = complete_bytes(path), path.stat().st_size
        damages = [] if num_bytes is None else [one for one in scan_segment(path) if isinstance(one, DamagedRange)]
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
        repair = Repair("cuts them off", lambda: _cut(path, num_bytes, size))
        yield Problem(str(path), meaning, "do nothing: servers ignore them", repair)


async def _cut(path: Path, num_bytes: int, size: int) -> str:
    await asyncio.to_thread(truncate_segment, path, num_bytes)
    return f"the last {size - num_bytes} bytes cut off"

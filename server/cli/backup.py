"""`trainhouse backup`: copies a state directory so that a server can start on the copy, even while a server runs.

Files are hard-linked if the file system supports it: only the segment that is being written ever changes, and that is
copied. The order of copying makes the copy consistent: the journal first and last, snapshots before results, results
before the database, and the checkpoints that the database names after it, in addition to those copied earlier. So
everything that a part of the copy refers to exists, and what is too new to be referred to is removed when a server
starts.
"""

import shutil
import sqlite3
import time
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoints.checkpoint_files import link_or_copy, moved_directories
from ..config.load import load_section
from ..config.option_values import is_url
from ..files.directories import STAGING, remove_tree
from ..files.object_store import key_of
from ..files.segment import SEGMENT_DIRECTORIES, complete_bytes, truncate_segment
from ..files.segment_log import RecordPosition
from ..files.state_lock import STATE_PATTERNS, check_database_kind, keep_private, live_directory
from ..journal.restore_marker import mark_copy
from ..store import DATABASE_NAME, StoreConfig
from .options import AsJson, new_app
from .output import print_json, spinner
from .server_flags import Sources, reads_state

_SECRET = "url_secret"
_TREES = ("loaded", "snapshots", "ephemeral", "evaluations")
_MAX_ROUNDS = 5


app = new_app()


@app.command()
@reads_state()
def backup(
    sources: Sources,
    target: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of the copy; fast on the same file system, by hard links.")
    ],
    as_json: AsJson = False,
) -> None:
    """Copy a server's state, while it runs or not, so that a server can start from the copy."""
    config = load_section(StoreConfig, *sources)
    check_database_kind(config)
    notes: list[str] = []
    with spinner(f"copying {config.state_dir}") as show:
        Backup(config.state_dir, target, config.database_url is None, show).run(notes.append)
    if as_json:
        print_json({"target": str(target), "notes": notes})
    else:
        print("\n".join(notes))


class BackupError(ValueError):
    """No backup could be made; the message says why and what to do."""


@dataclass
class Backup:
    """One backup of a state directory."""

    source: Path
    target: Path
    has_database: bool
    """The state directory holds the SQLite database; otherwise the server uses PostgreSQL."""
    on_progress: Callable[[int, int], None] = lambda done, total: None
    """Called with the bytes of files that are copied, and those of all files when the copy began."""
    _num_copied: int = field(default=0, init=False)

    @cached_property
    def _live(self) -> Path:
        return live_directory(self.source)

    @cached_property
    def _num_all(self) -> int:
        parts = (self.source / "checkpoints", *(self._live / name for name in (*SEGMENT_DIRECTORIES, *_TREES)))
        return sum(map(_num_bytes, parts))

    def run(self, say: Callable[[str], None]) -> None:
        """Makes the copy, blocking, and says what the user must know about it. Raises BackupError."""
        self._prepare()
        try:
            self._copy(say)
        except sqlite3.Error as error:
            raise BackupError(f"database {self.source / DATABASE_NAME} cannot be copied: {error}") from None

    def _copy(self, say: Callable[[str], None]) -> None:
        for _ in range(_MAX_ROUNDS):
            newest, began_at = _numbers(self._live / "journal")[-1:], time.time()
            named = self._take_all()
            if self._has_all_since(newest):
                mark_copy(self._live, self._target_of(self._live), began_at)
                self._report(named, say)
                return
            for path in self.target.iterdir():
                remove_tree(path)
        raise BackupError(
            "operations leave the journal faster than they can be copied: try again when the server is less busy"
        )

    def _take_all(self) -> Collection[str]:
        """Copies everything; returns the directories of the checkpoints in the copy."""
        named = self._named(self.source)
        self._take_segments("journal")
        self._take_named(named)
        self._take_trees()
        self._take_segments("results")
        if self.has_database:
            named = self._take_database()
        self._take_trees()
        self._take_segments("recordings")
        self._take_segments("journal")
        shutil.copy2(self.source / _SECRET, self.target / _SECRET)
        return named

    def _has_all_since(self, newest: list[int]) -> bool:
        """True if the copy has every journal segment since `newest`: none was added and deleted in between."""
        taken = _numbers(self._target_of(self._live / "journal"))
        return not newest or (
            set(newest) <= set(_numbers(self._live / "journal"))
            and taken[taken.index(newest[0]) :] == list(range(newest[0], taken[-1] + 1))
        )

    def _prepare(self) -> None:
        if not (self.source / _SECRET).is_file():
            raise BackupError(
                f"{self.source} is not the state directory of a server that has run: name that with --state-dir"
            )
        if self.has_database and not (self.source / DATABASE_NAME).is_file():
            raise BackupError(f"{self.source} has no {DATABASE_NAME}: name the server's database with --database-url")
        if self.target.resolve().is_relative_to(self.source.resolve()):
            raise BackupError(f"{self.target} is inside the state directory {self.source}: name a directory outside it")
        self.target.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_private(self.target, STATE_PATTERNS)
        if self.has_database and any(self.target.iterdir()):
            raise BackupError(f"{self.target} is not empty: name a directory that does not exist yet")

    def _named(self, state_dir: Path) -> Collection[str]:
        """Returns the checkpoint directories in the database, or on disk if the database is a PostgreSQL."""
        if not self.has_database:
            return [str(path) for path in (state_dir / "checkpoints").glob("*/*/*")]
        with closing(sqlite3.connect(state_dir / DATABASE_NAME)) as database:
            return [directory for (directory,) in database.execute("SELECT directory FROM checkpoints")]

    def _take_database(self) -> Collection[str]:
        """Copies the database until the copy has every checkpoint directory that it names: one that is saved and
        deleted between two steps might be missing."""
        named = self._copy_database()
        for _ in range(_MAX_ROUNDS):
            self._take_named(named)
            if all(is_url(one) or self._place_of(one).is_dir() for one in named):
                break
            named = self._copy_database()
        self._drop_newer_results()
        return named

    def _copy_database(self) -> Collection[str]:
        with (
            closing(sqlite3.connect(self.source / DATABASE_NAME)) as source,
            closing(sqlite3.connect(self.target / DATABASE_NAME)) as target,
        ):
            source.backup(target)
        return self._named(self.target)

    def _drop_newer_results(self) -> None:
        """Drops rows of results newer than the copied segments; the operations run again when a server starts."""
        results = self._target_of(self._live / "results")
        sizes = {path.stem: path.stat().st_size for path in results.glob("*.segment")}
        with closing(sqlite3.connect(self.target / DATABASE_NAME)) as database, database:
            rows = database.execute("SELECT request_id, place FROM results").fetchall()
            places = [(request_id, RecordPosition.parse(place)) for request_id, place in rows]
            newer = [(request_id,) for request_id, at in places if at.offset >= sizes.get(f"{at.segment:08d}", 0)]
            database.executemany("DELETE FROM results WHERE request_id = ?", newer)

    def _take_named(self, named: Collection[str]) -> None:
        """Copies checkpoints from their present directories; after a move of the state directory, the rows name the old
        ones until a server has started."""
        moved = moved_directories(named, (self.source.absolute() / "checkpoints",))
        for directory in named:
            if not is_url(directory):
                self._take_directory(Path(moved.get(directory, directory)), self._place_of(directory))

    def _place_of(self, directory: str) -> Path:
        return self.target / "checkpoints" / key_of(directory)

    def _take_trees(self) -> None:
        # Snapshots name what is in loaded/. It is taken before them, since it may go, and after, since they may be new.
        for tree in (*_TREES, "loaded"):
            for directory in self._live.glob(f"{tree}/*/[0-9]*"):
                self._take_directory(directory, self._target_of(directory))

    def _take_directory(self, source: Path, target: Path) -> None:
        """Copies a directory whole or not at all; retries if it is deleted or replaced meanwhile."""
        if source.name.startswith(STAGING) or target.exists():
            return
        staging = target.with_name(f"{STAGING}{target.name}")
        for _ in range(_MAX_ROUNDS):
            remove_tree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            try:
                before = source.stat().st_ino
                for path in source.rglob("*"):
                    if path.is_file():
                        taken = staging / path.relative_to(source)
                        taken.parent.mkdir(parents=True, exist_ok=True)
                        self._link(path, taken)
                is_same = source.stat().st_ino == before
            except FileNotFoundError:
                is_same = False
            if is_same:
                staging.rename(target)
                return
        remove_tree(staging)

    def _link(self, source: Path, taken: Path) -> None:
        link_or_copy(source, taken)
        self._num_copied += taken.stat().st_size
        self.on_progress(self._num_copied, self._num_all)

    def _target_of(self, path: Path) -> Path:
        return self.target / path.relative_to(self.source)

    def _take_segments(self, name: str) -> None:
        segments = sorted((self._live / name).glob("*.segment"))
        self._target_of(self._live / name).mkdir(parents=True, exist_ok=True)
        for segment in segments:
            taken = self._target_of(segment)
            try:
                if segment == segments[-1]:  # may be written at the moment: without an incomplete last record
                    taken.unlink(missing_ok=True)
                    shutil.copyfile(segment, taken)
                    num_bytes = complete_bytes(taken)
                    if num_bytes is not None and num_bytes < taken.stat().st_size:
                        truncate_segment(taken, num_bytes)
                elif not (taken.exists() and taken.stat().st_size == segment.stat().st_size):
                    taken.unlink(missing_ok=True)
                    self._link(segment, taken)
            except FileNotFoundError:  # the server has deleted it meanwhile
                continue

    def _report(self, named: Collection[str], say: Callable[[str], None]) -> None:
        if afar := [directory for directory in named if is_url(directory)]:
            words = f"{len(afar)} checkpoints are at URLs, such as {afar[0]}, and are not in the copy"
            say(f"{words}: a server on the copy reads and deletes the originals")
        if self.has_database:
            say(f"copied to {self.target}: check it with trainhouse verify --state-dir {self.target}")
        else:
            say(
                f"the database is not in {self.target}: pg_dump it now, then run this again with the same directory, "
                "to copy all files that the dump names"
            )


def _numbers(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.segment"))


def _num_bytes(directory: Path) -> int:
    """Returns the size of the files below a directory, some of which a server may delete meanwhile."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total

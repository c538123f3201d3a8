"""CheckpointFiles: where the files of checkpoints lie, how they get there, and how they are read back whole.

Below a place, a local directory or a URL, as RUN/KIND/NAME.VERSION. Locally they are written beside that, as
.staging-*, and come by one rename; to a URL they are carried, the manifest last. Whoever reads is given a local
directory that matches its manifest: the checkpoint's own, or a cached one; what is lost or damaged comes from a copy.
"""

import asyncio
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ...schemas.errors import OperationError
from ..config.values import is_url
from ..files.cache import Cache
from ..files.config import PlaceConfig
from ..files.directories import STAGING, make_directory, move_into_place, staging_in
from ..files.manifest import MANIFEST, check, listed_files, read_manifest, seal
from ..files.object_store import KEY_PARTS, PlaceError, Places, key_of
from ..replication.leases import live_directory
from ..store import DATABASE_NAME

logger = logging.getLogger(__name__)

Copies = Callable[[str], Awaitable[Collection[str]]]
UNLISTED_DAYS = 30
_UNLISTED = ".unlisted"
"""In a checkpoint, whole but without a row, since when that is known."""
_DELETED = ".deleted"
"""In a checkpoint whose row is about to go: what is left of it then is not taken back."""
_NEW_RUN = ".new"
CLOSING_SECONDS = 3.0
_Signature = tuple[tuple[str, int, int, int], ...]


class CheckpointFiles:
    """A checkpoint's `directory` is a path or a URL, and never used twice. copies: URLs where one is, too."""

    def __init__(self, state_dir: Path, config: PlaceConfig, places: Places, copies: Copies) -> None:
        self._own_root = state_dir.absolute() / "checkpoints"
        place = config.checkpoints or str(self._own_root)
        is_here = not is_url(place)
        self.local_root = Path(place).expanduser().absolute() if is_here else self._own_root
        self._root = str(self.local_root) if is_here else place.rstrip("/")
        self._places = places
        self._copies = copies
        self._staging = state_dir.absolute() / "staging"
        self._cache = Cache(state_dir.absolute() / "cache", config.checkpoint_cache_bytes)
        self._being_written: set[str] = set()
        self._removing: set[asyncio.Task[None]] = set()
        self._being_made_whole: dict[Path, asyncio.Task[None]] = {}
        self._seen_whole: dict[Path, _Signature] = {}

    def directory(self, run_name: str, kind: str, name: str) -> str:
        """A new one, at which there is nothing yet."""
        return f"{self._root}/{run_name}/{kind}/{name}.{secrets.token_hex(4)}"

    @asynccontextmanager
    async def staging(self, directory: str) -> AsyncIterator[Path]:
        """An empty local directory to write into, for as long as the block lasts. Raises OSError."""
        beside = self._staging if is_url(directory) else Path(directory).parent
        staging = staging_in(beside)
        self._being_written.add(directory)
        try:
            await asyncio.to_thread(make_directory, staging, sync=True)
            yield staging
        finally:
            self._being_written.discard(directory)
            await asyncio.to_thread(_remove, staging)

    @asynccontextmanager
    async def new_run(self, directory: str) -> AsyncIterator[None]:
        """To publish in, and to insert its row and its run's: else nobody would know whose it is, were it left over."""
        mark = Path(directory).parents[1] / _NEW_RUN
        if is_url(directory):
            yield
            return
        await asyncio.to_thread(mark.mkdir, parents=True)
        yield
        await asyncio.to_thread(_remove, mark)

    async def drop_new_run(self, directory: str) -> None:
        """Of which nothing is to be published."""
        if not is_url(directory):
            await asyncio.to_thread(_remove, Path(directory).parents[1])

    async def publish(self, staging: Path, directory: str, about: Mapping[str, object]) -> int:
        """Hashes the files, writes the manifest and brings all of it to its place, durably; returns their bytes.

        Raises OSError, PlaceError.
        """
        if not is_url(directory):
            return await asyncio.to_thread(self._seal_and_rename, staging, Path(directory), about)
        size_bytes = await asyncio.to_thread(seal, staging, about, sync=False)
        await self._places.upload(staging, directory)
        return size_bytes

    def may_copy_there(self, source: str, directory: str) -> bool:
        """Whether both are in one place that copies by itself."""
        return is_url(directory) and source.startswith(f"{self._root}/")

    async def copy_there(self, source: str, directory: str, about: Mapping[str, object]) -> int:
        """In place of `publish`. Raises PlaceError."""
        return await self._places.copy(source, directory, about)

    async def condemn(self, directory: str) -> None:
        """Before its row goes: else a crash would leave what looks like a checkpoint whose row was lost."""
        if not is_url(directory):
            await asyncio.to_thread(_mark, Path(directory) / _DELETED)

    async def unlisted(self, found: Collection[Path], published: Collection[str]) -> list[Path]:
        """Those of the found that are whole and without a row, and that nobody has deleted; the oldest first."""
        return await asyncio.to_thread(_unlisted, found, published)

    def is_ours_alone(self, directory: Path) -> bool:
        """True below the state directory, where no other server has anything."""
        return directory.is_relative_to(self._own_root)

    async def remove(self, directory: str) -> None:
        """At a URL in the background. What is not removed is found by the next start, or by `trainhouse verify`."""
        here = self._here(directory)
        self._seen_whole.pop(here, None)
        await asyncio.to_thread(_remove, here)
        if is_url(directory):
            removing = asyncio.create_task(self._remove_at(directory))
            self._removing.add(removing)
            removing.add_done_callback(self._removing.discard)

    async def close(self) -> None:
        """Gives what is being removed a moment."""
        if self._removing:
            await asyncio.wait(self._removing, timeout=CLOSING_SECONDS)
        for removing in self._removing:
            removing.cancel()

    async def manifest(self, directory: str) -> Mapping[str, Any]:
        """Raises OperationError (server)."""
        try:
            if is_url(directory):
                return await self._places.manifest(directory)
            return await asyncio.to_thread(read_manifest, Path(directory))
        except (PlaceError, OSError, ValueError):
            here = self._here(directory)
            await self._make_whole(directory, here)
            return await asyncio.to_thread(read_manifest, here)

    @asynccontextmanager
    async def reading(self, directory: str) -> AsyncIterator[Path]:
        """Its files in a local directory, for as long as the block lasts. Raises OperationError (server)."""
        here = self._here(directory)
        with self._cache.held(here):
            self._seen_whole.pop(here, None)
            await self._make_whole(directory, here)
            yield here

    async def file(self, directory: str, name: str) -> Path:
        """To be opened at once. Raises OperationError (server)."""
        here = self._here(directory)
        await self._make_whole(directory, here)
        return here / name

    async def follow_moved_root(self, directories: Collection[str]) -> Mapping[str, str]:
        """Old -> new directory of those that lie elsewhere now than when their rows were written; some may be lost."""
        return await asyncio.to_thread(self._moves, directories)

    async def found(self) -> Collection[Path]:
        """What lies here: checkpoints, published or not."""
        return await asyncio.to_thread(lambda: list(self.local_root.glob("*/*/*")))

    async def sweep(self, found: Collection[Path], runs: Collection[str], published: Collection[str]) -> None:
        """At start: what of the found was never published, or was deleted.

        Somebody may have put in an older database: runs that it does not know are left alone, and what is whole stays
        for UNLISTED_DAYS from when it was first found to have no row.
        """
        await asyncio.to_thread(_remove, self._staging)
        await asyncio.to_thread(self._cache.sweep)
        await asyncio.to_thread(_sweep, self.local_root, found, runs, published)

    async def sweep_url(self, runs: Collection[str], published: Callable[[], Awaitable[Collection[str]]]) -> None:
        """The same at a URL, beside everything else. Raises PlaceError.

        What is whole stays, however long: there it is others' business, too. `trainhouse verify` tells of it.
        """
        if not is_url(self._root):
            return
        found = await self._places.list(self._root)
        # Before the rows are read: what was being written has its row by then, or is among these.
        kept = set(self._being_written)
        kept |= set(await published())
        for key, names in found.items():
            directory = f"{self._root}/{key}"
            if key.partition("/")[0] in runs and MANIFEST not in names and directory not in kept:
                logger.info("removing %s: it was never published, or was deleted", directory)
                await self._places.remove(directory)

    def _here(self, directory: str) -> Path:
        return self._cache.path(directory) if is_url(directory) else Path(directory)

    async def _remove_at(self, url: str) -> None:
        try:
            await self._places.remove(url)
        except PlaceError as error:
            logger.warning("a checkpoint could not be removed: %s", error)

    async def _make_whole(self, directory: str, here: Path) -> None:
        """Once, however many ask for it meanwhile."""
        if here not in self._being_made_whole:
            making = self._being_made_whole[here] = asyncio.create_task(self._make_whole_now(directory, here))
            making.add_done_callback(lambda _: self._being_made_whole.pop(here))
        await asyncio.shield(self._being_made_whole[here])

    async def _make_whole_now(self, directory: str, here: Path) -> None:
        with self._cache.held(here):
            try:
                await asyncio.to_thread(self._check, here)
            except ValueError as error:
                sources = [directory] if is_url(directory) else []
                sources += await self._copies(directory)
                await self._bring(directory, here, sources, str(error))
                await asyncio.to_thread(self._check, here)
            if is_url(directory):
                await asyncio.to_thread(self._cache.used, here)

    def _check(self, here: Path) -> None:
        """Its hashes, unless its files are those that were seen to have them. Raises ValueError."""
        signature = _signature(here)
        if signature and self._seen_whole.get(here) == signature:
            return
        check(here)
        self._seen_whole[here] = signature

    async def _bring(self, directory: str, here: Path, sources: Collection[str], reason: str) -> None:
        """From the first source that has it whole."""
        staging = staging_in(here.parent)
        reasons = [] if is_url(directory) else [reason]
        for source in sources:
            try:
                await asyncio.to_thread(staging.mkdir, parents=True, exist_ok=True)
                await self._places.download(source, staging)
                await asyncio.to_thread(_put_in_place, staging, here)
            except (PlaceError, OSError) as error:
                reasons.append(str(error))
            else:
                if source != directory:
                    done = "is read from its copy at" if is_url(directory) else "was brought back from"
                    logger.warning("%s %s %s (%s)", directory, done, source, "; ".join(reasons))
                return
            finally:
                await asyncio.to_thread(_remove, staging)
        remedy = "" if sources else "; it has no copy: start the server with --mirror to have them"
        raise OperationError(f"the checkpoint's files cannot be read: {'; '.join(reasons)}{remedy}", "server")

    def _seal_and_rename(self, staging: Path, directory: Path, about: Mapping[str, object]) -> int:
        size_bytes = seal(staging, about)
        move_into_place(staging, directory, root=directory.parents[KEY_PARTS - 1])
        return size_bytes

    def _moves(self, directories: Collection[str]) -> Mapping[str, str]:
        found = moves(directories, (self.local_root, self._own_root))
        if lost := [old for old, new in found.items() if not Path(new).exists()]:
            logger.warning(
                "%d checkpoints of this database lie in another state directory and are that server's, such as %s: to "
                "have them here, too, stop this server and copy them to where they are looked for now, such as %s",
                *(len(lost), lost[0], found[lost[0]]),
            )
        return found


def moves(directories: Collection[str], roots: Sequence[Path]) -> Mapping[str, str]:
    """Old -> new directory of checkpoints whose rows are of when the state directory, or --checkpoints, was another.

    roots: where they may lie now, the last one the state directory's own. Where --checkpoints was changed, what was
    saved before is where it was. But what lies in another state directory is that server's, and not ours to read or to
    delete: where a state directory was copied without some of its files, they are lost here.
    """
    local = {one: Path(one).parents[KEY_PARTS - 1] for one in directories if not is_url(one)}
    of_others = {root for root in set(local.values()) if _is_of_another_state(root, roots[-1].parent)}
    found = {}
    for old, root in local.items():
        new = [place / key_of(old) for place in roots]
        there = next((place for place in new if place.exists()), new[-1] if root in of_others else Path(old))
        if there != Path(old):
            found[old] = str(there)
    return found


def _is_of_another_state(root: Path, state_dir: Path) -> bool:
    """Whether a root of checkpoints is that of another state directory."""
    state = root.parent
    try:
        has_state = (state / DATABASE_NAME).exists() or live_directory(state) != state
        return root.name == "checkpoints" and has_state and not state.samefile(state_dir)
    except OSError:  # there is nothing, or nothing that may be read
        return False


def link_files(source: Path, target: Path) -> None:
    """Those of the manifest. Published files never change, so two checkpoints may share them."""
    for name in listed_files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source / name, target / name)


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links, or two of them
        shutil.copyfile(source, target)


def _put_in_place(staging: Path, here: Path) -> None:
    """Of what was there before. Between the two renames there is neither: who comes then brings it once more."""
    before = staging.with_name(f"{staging.name}-before")
    if here.exists():
        here.rename(before)
    staging.rename(here)
    _remove(before)


def _signature(directory: Path) -> _Signature:
    stats = [(path.name, path.stat()) for path in sorted(directory.rglob("*"))]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def _remove(*directories: Path) -> None:
    """What cannot be removed now (a worker still writes into it) is swept at the next start."""
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(root: Path, found: Collection[Path], runs: Collection[str], published: Collection[str]) -> None:
    for mark in root.glob(f"*/{_NEW_RUN}"):
        _remove(mark if mark.parent.name in runs else mark.parent)
    for directory in found:
        if str(directory) in published:
            _unmark(directory / _UNLISTED)
            _unmark(directory / _DELETED)
        elif directory.name.startswith(STAGING) or (directory.parent.parent.name in runs and not _stays(directory)):
            logger.info("removing %s: it was never published, or was deleted", directory)
            _remove(directory)


def _unlisted(found: Collection[Path], published: Collection[str]) -> list[Path]:
    kept = [
        one
        for one in found
        if str(one) not in published
        and not one.name.startswith(STAGING)
        and not (one / _DELETED).exists()
        and not (one.parents[1] / _NEW_RUN).exists()
        and is_whole(one)
    ]
    return sorted(kept, key=lambda one: (one / MANIFEST).stat().st_mtime)


def _mark(mark: Path) -> None:
    try:
        mark.touch()
    except OSError as error:  # files that are lost, or a full disk: no reason to keep the rest
        logger.info("%s cannot be written: %s", mark, error)


def _unmark(mark: Path) -> None:
    """Of a checkpoint that has a row again."""
    try:
        if mark.exists():  # else nothing is written: the file system may be read-only
            mark.unlink(missing_ok=True)
    except OSError as error:
        logger.error("%s cannot be removed: %s", mark, error)


def _stays(unlisted: Path) -> bool:
    """A checkpoint without a row."""
    if (unlisted / _DELETED).exists() or not is_whole(unlisted):
        return False
    mark = unlisted / _UNLISTED
    try:
        if not mark.exists():
            mark.touch()
        days = (time.time() - mark.stat().st_mtime) / 86400
    except OSError as error:
        logger.error("%s cannot be written: %s", mark, error)
        return True
    if days > UNLISTED_DAYS:
        return False
    logger.warning(
        "%s is whole, but has no row in the database: if that is not an older one, a crash has left it. `trainhouse "
        "verify --repair` takes it back where it says whose it is; a start in %d days removes it",
        unlisted,
        math.ceil(UNLISTED_DAYS - days),
    )
    return True


def is_whole(directory: Path) -> bool:
    """By the sizes of its files."""
    try:
        check(directory, hashes=False)
    except ValueError:
        return False
    return True

"""Stores the files of checkpoints, locally or at a URL, and reads them back complete and verified.

A checkpoint is stored below the configured directory or URL as RUN/KIND/NAME.VERSION. Locally it is written to a
sibling .staging-* directory and published by one rename; to a URL the files are uploaded, the manifest last. Readers
get a local directory that matches its manifest: the checkpoint's own or a cached one. Lost or damaged files are
restored from a copy.
"""

import asyncio
import logging
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from ...schemas.errors import OperationError
from ..config.option_values import is_url
from ..files.checkpoint_cache import CheckpointCache
from ..files.directories import make_directory, move_into_place, staging_path
from ..files.manifest import MANIFEST, check_directory, listed_files, read_manifest, write_manifest
from ..files.object_store import ObjectStore, ObjectStoreError, key_of
from ..files.remote_directory import KEY_PARTS
from ..files.state_lock import live_directory
from ..files.storage_config import CheckpointStorageConfig
from ..store import DATABASE_NAME
from .leftovers import DELETED, NEW_RUN, remove_now, set_mark, sweep_leftovers

logger = logging.getLogger(__name__)

CLOSING_SECONDS = 3.0

FindCopies = Callable[[str], Awaitable[Collection[str]]]
"""Returns the URLs of a directory's complete copies."""

_Signature = tuple[tuple[str, int, int, int], ...]
"""Name, size, time of change and inode of each file."""


class CheckpointFiles:
    """Reads, writes and deletes the files of checkpoints. Their `directory` is a path or a URL, and is never reused."""

    def __init__(
        self, state_dir: Path, config: CheckpointStorageConfig, object_store: ObjectStore, copies: FindCopies
    ) -> None:
        self._own_root = state_dir.absolute() / "checkpoints"
        place = config.checkpoints or str(self._own_root)
        is_here = not is_url(place)
        self.local_root = Path(place).expanduser().absolute() if is_here else self._own_root
        self._root = str(self.local_root) if is_here else place.rstrip("/")
        self._object_store = object_store
        self._staging = state_dir.absolute() / "staging"
        self._cache = CheckpointCache(state_dir.absolute() / "cache", config.checkpoint_cache_bytes)
        self._being_written: set[str] = set()
        self._removing: set[asyncio.Task[None]] = set()
        self._unwanted: set[Path] = set()
        self._verified = VerifiedFiles(object_store, self._cache, copies)

    def directory(self, run_name: str, kind: str, name: str) -> str:
        return f"{self._root}/{run_name}/{kind}/{name}.{secrets.token_hex(4)}"

    @asynccontextmanager
    async def staging(self, directory: str) -> AsyncIterator[Path]:
        """Yields an empty local directory to write into and removes it afterwards. Raises OSError."""
        beside = self._staging if is_url(directory) else Path(directory).parent
        staging = staging_path(beside)
        self._being_written.add(directory)
        try:
            await asyncio.to_thread(make_directory, staging, sync=True)
            yield staging
        finally:
            self._being_written.discard(directory)
            await asyncio.to_thread(remove_now, staging)

    @asynccontextmanager
    async def marking_new_run(self, directory: str) -> AsyncIterator[None]:
        """Marks the run's directory as new while its first checkpoint is published and the rows are inserted.

        After a crash, the mark shows that the directory may be deleted although the database does not have the run.
        """
        mark = Path(directory).parents[1] / NEW_RUN
        if is_url(directory):
            yield
            return
        await asyncio.to_thread(mark.mkdir, parents=True)
        yield
        await asyncio.to_thread(remove_now, mark)

    async def discard_new_run(self, directory: str) -> None:
        if not is_url(directory):
            await asyncio.to_thread(remove_now, Path(directory).parents[1])

    async def publish(self, staging: Path, directory: str, entries: Mapping[str, object]) -> int:
        """Hashes the files, writes the manifest and moves everything into place, durably; returns the bytes of the
        files. Raises OSError, ObjectStoreError."""
        if not is_url(directory):
            return await asyncio.to_thread(self._seal_and_rename, staging, Path(directory), entries)
        size_bytes = await asyncio.to_thread(write_manifest, staging, entries, sync=False)
        await self._object_store.upload(staging, directory)
        return size_bytes

    def can_copy_remotely(self, source: str, directory: str) -> bool:
        """True if source and target are in the same object store, which can copy without a download."""
        return is_url(directory) and source.startswith(f"{self._root}/")

    async def copy_remotely(self, source: str, directory: str, entries: Mapping[str, object]) -> int:
        """Copies within the object store, instead of `publish`; returns the bytes of the files. Raises
        ObjectStoreError."""
        return await self._object_store.copy(source, directory, entries)

    async def mark_deleted(self, directory: str) -> None:
        """Marks the checkpoint before its row is deleted: after a crash in between its row would look lost."""
        if not is_url(directory):
            await asyncio.to_thread(set_mark, Path(directory) / DELETED)

    def is_ours_alone(self, directory: Path) -> bool:
        """True below the state directory, which no other server uses."""
        return directory.is_relative_to(self._own_root)

    async def remove(self, directory: str) -> None:
        """Removes the files, those that are being read after that; at a URL in the background. The next start or
        `trainhouse verify` finds what remains."""
        here = self._local_path(directory)
        self._verified.forget(here)
        self._unwanted.add(here)
        await self._remove_if_unread(here)
        if is_url(directory):
            removing = asyncio.create_task(self._remove_at(directory))
            self._removing.add(removing)
            removing.add_done_callback(self._removing.discard)

    async def _remove_if_unread(self, here: Path) -> None:
        if here in self._unwanted and not self._cache.is_held(here):
            await asyncio.to_thread(remove_now, here)
            self._unwanted.discard(here)

    async def close(self) -> None:
        """Waits up to CLOSING_SECONDS for removals, then cancels them."""
        if self._removing:
            await asyncio.wait(self._removing, timeout=CLOSING_SECONDS)
        for removing in self._removing:
            removing.cancel()

    async def manifest(self, directory: str) -> Mapping[str, Any]:
        """Returns the manifest. Raises OperationError (server) if neither the checkpoint nor a copy has it."""
        try:
            if is_url(directory):
                return await self._object_store.manifest(directory)
            return await asyncio.to_thread(read_manifest, Path(directory))
        except (ObjectStoreError, OSError, ValueError):
            async with self.reading(directory, rehash=False) as here:
                return await asyncio.to_thread(read_manifest, here)

    @asynccontextmanager
    async def reading(self, directory: str, *, rehash: bool = True) -> AsyncIterator[Path]:
        """Yields a local directory with the verified files, kept while the block runs. Raises OperationError (server).

        rehash: also if the same files passed before.
        """
        here = self._local_path(directory)
        if here in self._unwanted:
            raise OperationError(f"{directory} was deleted", "server")
        try:
            with self._cache.hold(here):
                if rehash:
                    self._verified.forget(here)
                await self._verified.ensure(directory, here)
                yield here
        finally:
            await self._remove_if_unread(here)

    @asynccontextmanager
    async def linked(self, directory: str) -> AsyncIterator[Path]:
        """Yields links to the verified files, which may be replaced. Raises OperationError (server), OSError."""
        async with AsyncExitStack() as kept:
            async with self.reading(directory) as here:
                staging = await kept.enter_async_context(self.staging(str(here)))
                await asyncio.to_thread(link_files, here, staging)
            yield staging

    def moves(self, directories: Collection[str]) -> Mapping[str, str]:
        """Returns old -> new directory of checkpoints that have moved since their rows were written. Blocking."""
        found = moved_directories(directories, (self.local_root, self._own_root))
        if lost := [old for old, new in found.items() if not Path(new).exists()]:
            logger.warning(
                "%d checkpoints of this database are stored in another server's state directory, such as %s: to use "
                "them here as well, stop this server and copy them to where it looks for them, such as %s",
                *(len(lost), lost[0], found[lost[0]]),
            )
        return found

    def sweep(self, found: Collection[Path], runs: Collection[str], published: Collection[str]) -> None:
        """Removes, at start, those found that were never published or were deleted. Blocking.

        An operator may have restored an older database, so directories of unknown runs are left alone, and complete
        checkpoints stay for UNLISTED_DAYS after they were first found to have no row.
        """
        remove_now(self._staging)
        self._cache.sweep()
        sweep_leftovers(self.local_root, found, runs, published)

    async def sweep_url(self, runs: Collection[str], published: Callable[[], Awaitable[Collection[str]]]) -> None:
        """Removes unfinished uploads at the configured URL; complete checkpoints stay, since other servers may use the
        same URL, and `trainhouse verify` reports them. Raises ObjectStoreError."""
        if not is_url(self._root):
            return
        found = await self._object_store.list(self._root)
        # Taken before the rows are read: an upload that was running either has its row by then or is in this set.
        kept = set(self._being_written)
        kept |= set(await published())
        for key, names in found.items():
            directory = f"{self._root}/{key}"
            if key.partition("/")[0] in runs and MANIFEST not in names and directory not in kept:
                logger.info("removing %s: it was never published, or it was deleted", directory)
                await self._object_store.remove(directory)

    def _local_path(self, directory: str) -> Path:
        return self._cache.path(directory) if is_url(directory) else Path(directory)

    async def _remove_at(self, url: str) -> None:
        try:
            await self._object_store.remove(url)
        except ObjectStoreError as error:
            logger.warning("a checkpoint could not be removed: %s", error)

    def _seal_and_rename(self, staging: Path, directory: Path, entries: Mapping[str, object]) -> int:
        size_bytes = write_manifest(staging, entries)
        move_into_place(staging, directory, root=directory.parents[KEY_PARTS - 1])
        return size_bytes


def moved_directories(directories: Collection[str], roots: Sequence[Path]) -> Mapping[str, str]:
    """Returns old -> new directory of checkpoints with rows of another state directory or --checkpoints.

    If --checkpoints was changed, earlier checkpoints are still where they were. A checkpoint in another server's state
    directory belongs to that server, and this one must neither read nor delete it: if a state directory was copied
    without some of its files, those checkpoints are lost here.

    Args:
        directories: of all checkpoints, as in their rows.
        roots: where they may be now; the last one is the state directory's own.
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
    """True if `root` holds the checkpoints of another state directory."""
    state = root.parent
    try:
        has_state = (state / DATABASE_NAME).exists() or live_directory(state) != state
        return root.name == "checkpoints" and has_state and not state.samefile(state_dir)
    except OSError:  # missing or not readable
        return False


def link_files(source: Path, target: Path) -> None:
    """Links or copies the files of the manifest. Published files never change, so two checkpoints may share them."""
    for name in listed_files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source / name, target / name)


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links, or two different ones
        shutil.copyfile(source, target)


class VerifiedFiles:
    """Verifies local directories by their manifest, and downloads lost ones from the checkpoint's URL or a copy."""

    def __init__(self, object_store: ObjectStore, cache: CheckpointCache, copies: FindCopies) -> None:
        self._object_store = object_store
        self._cache = cache
        self._copies = copies
        self._restoring: dict[Path, asyncio.Task[None]] = {}
        self._signatures: dict[Path, _Signature] = {}

    async def ensure(self, directory: str, here: Path) -> None:
        """Verifies or restores the files; concurrent callers share one run of it."""
        if here not in self._restoring:
            making = self._restoring[here] = asyncio.create_task(self._verify_or_restore(directory, here))
            making.add_done_callback(lambda _: self._restoring.pop(here))
        await asyncio.shield(self._restoring[here])

    async def _verify_or_restore(self, directory: str, here: Path) -> None:
        with self._cache.hold(here):
            try:
                await asyncio.to_thread(self._check, here)
            except ValueError as error:
                sources = [directory] if is_url(directory) else []
                sources += await self._copies(directory)
                await self._restore_from(directory, here, sources, str(error))
                await asyncio.to_thread(self._check, here)
            if is_url(directory):
                await asyncio.to_thread(self._cache.touch, here)

    def forget(self, here: Path) -> None:
        """Makes the next check hash the files again."""
        self._signatures.pop(here, None)

    def _check(self, here: Path) -> None:
        """Verifies the hashes, unless the same files passed before. Raises ValueError."""
        signature = _signature(here)
        if signature and self._signatures.get(here) == signature:
            return
        check_directory(here)
        self._signatures[here] = signature

    async def _restore_from(self, directory: str, here: Path, sources: Collection[str], reason: str) -> None:
        """Downloads the checkpoint from the first source that has it complete. Raises OperationError (server), which
        says why each one failed."""
        staging = staging_path(here.parent)
        reasons = [] if is_url(directory) else [reason]
        for source in sources:
            try:
                await asyncio.to_thread(staging.mkdir, parents=True, exist_ok=True)
                await self._object_store.download(source, staging)
                await asyncio.to_thread(_replace_with, staging, here)
            except (ObjectStoreError, OSError) as error:
                reasons.append(str(error))
            else:
                if source != directory:
                    done = "is read from its copy at" if is_url(directory) else "was restored from"
                    logger.warning("%s %s %s (%s)", directory, done, source, "; ".join(reasons))
                return
            finally:
                await asyncio.to_thread(remove_now, staging)
        remedy = "" if sources else "; it has no copy: start the server with --mirror to keep copies"
        raise OperationError(f"the checkpoint's files cannot be read: {'; '.join(reasons)}{remedy}", "server")


def _replace_with(staging: Path, here: Path) -> None:
    """Replaces `here`. Between the two renames neither exists; a reader that meets this downloads again."""
    before = staging.with_name(f"{staging.name}-before")
    if here.exists():
        here.rename(before)
    staging.rename(here)
    remove_now(before)


def _signature(directory: Path) -> _Signature:
    stats = [(path.name, path.stat()) for path in sorted(directory.rglob("*"))]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)

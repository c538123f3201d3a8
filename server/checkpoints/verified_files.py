"""Local directories whose files match their manifest: verified, or downloaded from the checkpoint's URL or a copy."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from ...schemas.errors import OperationError
from ..config.option_values import is_url
from ..files.checkpoint_cache import CheckpointCache
from ..files.directories import staging_path
from ..files.manifest import check_directory
from ..files.object_store import ObjectStore, ObjectStoreError
from .leftovers import remove_now

logger = logging.getLogger(__name__)

FindCopies = Callable[[str], Awaitable[Collection[str]]]
"""Returns the URLs of a directory's complete copies."""

_Signature = tuple[tuple[str, int, int, int], ...]
"""Name, size, time of change and inode of each file."""


class VerifiedFiles:
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

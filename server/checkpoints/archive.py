"""A checkpoint's files as one tar archive, which SDKs up to 0.35 download."""

import asyncio
import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...schemas.adapters.adapter_files import write_for_peft
from ...schemas.adapters.peft import DESCRIPTION
from ...schemas.errors import OperationError, RequestError
from ..files.directories import files_in
from ..store import CheckpointRecord
from .checkpoint_files import CheckpointFiles

COMPLETE = "checkpoint_complete"
"""An empty file, last in the archive, by which these SDKs see that it is whole."""

_MOST_OF_TENANT = 8
"""Archives of a tenant's checkpoints at a time: each may take as much disk as an adapter."""
_RETRY_SECONDS = 10.0
_PIECE_BYTES = 1 << 18
_END = bytes(tarfile.RECORDSIZE)


@dataclass(frozen=True)
class Archive:
    """An archive that is written piece by piece from a directory that does not change."""

    directory: Path
    files: Sequence[str]
    """Relative to the directory."""
    changed_at: float

    @property
    def num_bytes(self) -> int:
        return sum(len(self._header(name)) + _padded(self._size(name)) for name in (*self.files, COMPLETE)) + len(_END)

    def pieces(self) -> Iterator[bytes]:
        for name in self.files:
            yield self._header(name)
            with (self.directory / name).open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
            yield bytes(_padded(size := self._size(name)) - size)
        yield self._header(COMPLETE) + _END

    def _size(self, name: str) -> int:
        return 0 if name == COMPLETE else (self.directory / name).stat().st_size

    def _header(self, name: str) -> bytes:
        info = tarfile.TarInfo(name)
        info.size, info.mtime = self._size(name), int(self.changed_at)
        return info.tobuf(tarfile.PAX_FORMAT)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


@dataclass
class _OpenArchive:
    tenant_id: str
    making: asyncio.Task[Archive]
    made: AsyncExitStack
    """Removes the archive's directory."""
    num_readers: int = field(default=0, init=False)


class Archives:
    """The archives that are being downloaded, one for each checkpoint, however many download it."""

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files
        self._rewriting = asyncio.Lock()  # held while an adapter is rewritten, which may need as much of disk and CPU
        self._open: dict[str, _OpenArchive] = {}  # by the checkpoint's directory

    @asynccontextmanager
    async def reading(self, checkpoint: CheckpointRecord) -> AsyncIterator[Archive]:
        """Yields the archive of the files as PEFT loads them. Raises OperationError (server) if they cannot be read or
        rewritten, RequestError 429 if too many checkpoints of their owner are being downloaded."""
        opened = self._open.get(checkpoint.directory) or self._begin(checkpoint)
        opened.num_readers += 1
        try:
            yield await asyncio.shield(opened.making)
        finally:
            opened.num_readers -= 1
            if not opened.num_readers:
                del self._open[checkpoint.directory]
                await asyncio.wait({opened.making})
                await opened.made.aclose()

    def _begin(self, checkpoint: CheckpointRecord) -> _OpenArchive:
        num = sum(one.tenant_id == checkpoint.tenant_id for one in self._open.values())
        if num >= _MOST_OF_TENANT:
            busy = f"archives of {num} checkpoints of this owner are being downloaded"
            remedy = "download one after another, or the files by external_weights_urls"
            raise RequestError(f"{busy}: {remedy}", 429, _RETRY_SECONDS)
        made = AsyncExitStack()
        making = asyncio.create_task(self._make(checkpoint, made))
        opened = self._open[checkpoint.directory] = _OpenArchive(checkpoint.tenant_id, making, made)
        return opened

    async def _make(self, checkpoint: CheckpointRecord, made: AsyncExitStack) -> Archive:
        linked = await made.enter_async_context(self._files.linked(checkpoint.directory))
        if checkpoint.kind != "external_weights":  # it has the names that tinker-cookbook reads
            async with self._rewriting:
                await asyncio.to_thread(_write_for_peft, linked)
        return Archive(linked, await asyncio.to_thread(files_in, linked), checkpoint.created_at)


def _write_for_peft(directory: Path) -> None:
    if not (directory / DESCRIPTION).exists():  # of an adapter that needs no other form
        return
    try:
        write_for_peft(directory)
    except (OSError, ValueError, KeyError) as error:
        raise OperationError(f"its adapter cannot be written as PEFT loads it: {error}", "server") from error

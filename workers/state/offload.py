"""Offload: tensors that leave the device together, and come back to all who hold them or views of them.

From an accelerator they go to pinned host memory; from a CPU, whose memory is the host's, to the disk.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from ...schemas.errors import OperationError
from ..ops.memory import is_out_of_memory
from .page_file import PageFile


class Copy(Protocol):
    """What storages hold, elsewhere."""

    def read(self, storages: Sequence[Tensor]) -> None:
        """Fills them, bytes as long as they were. Raises OSError, RuntimeError."""
        ...

    def drop(self) -> None: ...


class HostCopy:
    """In pinned host memory."""

    def __init__(self, storages: Sequence[Tensor]) -> None:
        self._bytes = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in storages]
        for copy, each in zip(self._bytes, storages, strict=True):
            copy.copy_(each, non_blocking=True)
        torch.cuda.synchronize(storages[0].device)

    def read(self, storages: Sequence[Tensor]) -> None:
        for copy, each in zip(self._bytes, storages, strict=True):
            each.copy_(copy, non_blocking=True)

    def drop(self) -> None:
        self._bytes = []


class DiskCopy:
    """In a page of the file."""

    def __init__(self, storages: Sequence[Tensor], pages: PageFile) -> None:
        """Raises OSError, such as on a full disk."""
        self._pages, self._page = pages, pages.write(storages)

    def read(self, storages: Sequence[Tensor]) -> None:
        self._pages.read(self._page, storages)

    def drop(self) -> None:
        self._pages.free(self._page)


class Offload:
    """Some tensors of a device. what: they are, in messages. is_frozen: whether they never change, so that a copy that
    was made once is good for ever. directory: see PageFile.

    moved_bytes, moving_seconds: since the start, to and fro.
    """

    def __init__(self, what: str, device: torch.device, directory: str | None = None, is_frozen: bool = False) -> None:
        self._what, self._device, self._is_frozen = what, device, is_frozen
        self._pages = PageFile(directory)
        self._copy: Copy | None = None
        self._storages: list[UntypedStorage] = []
        self._sizes: list[int] = []
        self.is_away = False
        self.moved_bytes, self.moving_seconds = 0, 0.0

    @property
    def num_bytes_away(self) -> int:
        return sum(self._sizes) if self.is_away else 0

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """All of these, or none. Raises OperationError (server) where there is no room for them."""
        if self.is_away:
            return
        started, storages = time.monotonic(), _movable(tensors)
        if self._copy is None or not _are_same(storages, self._storages):
            self._drop_copy()
            self._copy = self._copied(storages)
            self.moved_bytes += sum(storage.nbytes() for storage in storages)
        self._storages, self._sizes = storages, [storage.nbytes() for storage in storages]
        self._empty()
        self.moving_seconds += time.monotonic() - started

    def come_back(self) -> None:
        """To where they were; to leave again costs nothing until they `may_change`. Raises OperationError (server),
        and all are away then, where the device has no room or what is away cannot be read."""
        if not self.is_away:
            return
        started = time.monotonic()
        try:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                storage.resize_(size)
            if self._copy is not None:
                self._copy.read([_bytes(storage, self._device) for storage in self._storages])
        except Exception as error:
            self._empty()
            if not (isinstance(error, OSError) or is_out_of_memory(error)):
                raise
            remedy = "try again, or leave room on the device and the disk"
            raise OperationError(
                f"{self._what} cannot be brought back to the device: {error}; {remedy}", "server"
            ) from None
        self.is_away = False
        self.moved_bytes += sum(self._sizes)
        self.moving_seconds += time.monotonic() - started

    def may_change(self) -> None:
        """What has come back is used from now on."""
        if not (self._is_frozen or self.is_away):
            self._drop_copy()
            self._storages, self._sizes = [], []

    def forget(self) -> None:
        """What is away is of no use any more: nobody may read it."""
        self.is_away = False
        self._drop_copy()
        self._storages, self._sizes = [], []

    def _copied(self, storages: Sequence[UntypedStorage]) -> Copy | None:
        of_bytes = [_bytes(storage, self._device) for storage in storages]
        if not of_bytes:
            return None
        try:
            return DiskCopy(of_bytes, self._pages) if self._device.type == "cpu" else HostCopy(of_bytes)
        except Exception as error:
            if not (isinstance(error, OSError) or is_out_of_memory(error)):
                raise
            raise OperationError(
                f"{self._what} cannot leave the device: {error}; leave room in host memory, and on a CPU on the disk of"
                " temporary files",
                "server",
            ) from None

    def _empty(self) -> None:
        for storage in self._storages:
            storage.resize_(0)
        self.is_away = True

    def _drop_copy(self) -> None:
        if self._copy is not None:
            self._copy.drop()
        self._copy = None


def _movable(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Each once. Storages of a mapped file stay where they are: what they take the system takes back by itself."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in storages.values() if storage.resizable() and storage.nbytes()]


def _are_same(storages: Sequence[UntypedStorage], others: Sequence[UntypedStorage]) -> bool:
    return [storage._cdata for storage in storages] == [storage._cdata for storage in others]


def _bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # pyright: ignore[reportArgumentType]

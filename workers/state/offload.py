"""Moves tensors off the device together, and back for everyone who holds them or views of them.

From an accelerator they go to pinned host memory; from a CPU, whose memory is the host's, to the disk.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from ...schemas.errors import OperationError
from ..resources.memory import is_out_of_memory
from .page_file import PageFile


class StorageCopy(Protocol):
    """A copy of the content of storages."""

    def read(self, storages: Sequence[Tensor]) -> None:
        """Fills storages of the same sizes with the copy. Raises OSError, RuntimeError."""
        ...

    def drop(self) -> None: ...


class HostCopy:
    """A copy in pinned host memory."""

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
    """A copy that is stored in a page of the page file."""

    def __init__(self, storages: Sequence[Tensor], pages: PageFile) -> None:
        """Writes the copy. Raises OSError, for example on a full disk."""
        self._pages, self._page = pages, pages.write(storages)

    def read(self, storages: Sequence[Tensor]) -> None:
        self._pages.read(self._page, storages)

    def drop(self) -> None:
        self._pages.free(self._page)


class Offload:
    """Offloads some tensors of a device.

    what: their name in messages. is_frozen: whether they never change, so that a copy stays valid for ever. directory:
    see PageFile. moved_bytes, moving_seconds: totals in both directions since the start.
    """

    def __init__(self, what: str, device: torch.device, directory: str | None = None, is_frozen: bool = False) -> None:
        self._what, self._device, self._is_frozen = what, device, is_frozen
        self._pages = PageFile(directory)
        self._copy: StorageCopy | None = None
        self._storages: list[UntypedStorage] = []
        self._sizes: list[int] = []
        self.is_offloaded = False
        self.moved_bytes, self.moving_seconds = 0, 0.0

    @property
    def num_offloaded_bytes(self) -> int:
        return sum(self._sizes) if self.is_offloaded else 0

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Offloads all of these tensors, or none.

        Raises:
            OperationError: (server) there is no room for them.
        """
        if self.is_offloaded:
            return
        started, storages = time.monotonic(), _movable(tensors)
        are_same = [each._cdata for each in storages] == [each._cdata for each in self._storages]
        if self._copy is None or not are_same:
            self._drop_copy()
            self._copy = self._copied(storages)
            self.moved_bytes += sum(storage.nbytes() for storage in storages)
        self._storages, self._sizes = storages, [storage.nbytes() for storage in storages]
        self._empty()
        self.moving_seconds += time.monotonic() - started

    def reload(self) -> None:
        """Reloads the tensors in place. Offloading them again is free until `discard_copy`.

        Raises:
            OperationError: (server) the device has no room, or the copy cannot be read; all tensors stay offloaded.
        """
        if not self.is_offloaded:
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
            remedy = "try again, or free memory on the device and space on the disk"
            raise OperationError(
                f"{self._what} cannot be brought back to the device: {error}; {remedy}", "server"
            ) from None
        self.is_offloaded = False
        self.moved_bytes += sum(self._sizes)
        self.moving_seconds += time.monotonic() - started

    def discard_copy(self) -> None:
        """Discards the copy before the reloaded tensors are used, because they may change."""
        if not (self._is_frozen or self.is_offloaded):
            self._drop_copy()
            self._storages, self._sizes = [], []

    def forget(self) -> None:
        """Discards the offloaded tensors, which no one may read any more."""
        self.is_offloaded = False
        self._drop_copy()
        self._storages, self._sizes = [], []

    def _copied(self, storages: Sequence[UntypedStorage]) -> StorageCopy | None:
        of_bytes = [_bytes(storage, self._device) for storage in storages]
        if not of_bytes:
            return None
        try:
            return DiskCopy(of_bytes, self._pages) if self._device.type == "cpu" else HostCopy(of_bytes)
        except Exception as error:
            if not (isinstance(error, OSError) or is_out_of_memory(error)):
                raise
            raise OperationError(
                f"{self._what} cannot leave the device: {error}; free host memory, or on a CPU space on the disk of"
                " temporary files",
                "server",
            ) from None

    def _empty(self) -> None:
        for storage in self._storages:
            storage.resize_(0)
        self.is_offloaded = True

    def _drop_copy(self) -> None:
        if self._copy is not None:
            self._copy.drop()
        self._copy = None


def _movable(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Returns the storages of the tensors, each once.

    Storages of a mapped file are left out: the system reclaims their memory itself.
    """
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in storages.values() if storage.resizable() and storage.nbytes()]


def _bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # pyright: ignore[reportArgumentType]

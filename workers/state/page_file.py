"""Stores vectors on disk, in one unlinked temporary file."""

import ctypes
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torch import Tensor

_BLOCK = 4096


@dataclass(frozen=True)
class FilePage:
    """Bytes offset : offset + num_bytes of the file, both multiples of a block."""

    offset: int
    num_bytes: int

    @property
    def stop(self) -> int:
        return self.offset + self.num_bytes


class PageFile:
    """Pages of any size in a file that is created on first use.

    No directory lists the file, so it disappears when this process ends for any reason. Raises ValueError on a
    directory that cannot be written to; None is the system's directory for temporary files.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._opened: IO[bytes] | None = None
        self._free: list[FilePage] = []
        self._size = 0
        if directory is not None:
            self._open_now(directory)

    def write(self, vectors: Sequence[Tensor]) -> FilePage:
        """Writes the vectors to a new page. Raises OSError, for example on a full disk; nothing is kept then."""
        page = self._allocate(sum(vector.nbytes for vector in vectors))
        offset = page.offset
        try:
            for vector in vectors:
                _write_all(self._file, _bytes(vector), offset)
                offset += vector.nbytes
        except OSError:
            self.free(page)
            raise
        return page

    def read(self, page: FilePage, vectors: Sequence[Tensor]) -> None:
        """Fills the vectors that were written, in their order. Raises OSError."""
        offset = page.offset
        for vector in vectors:
            _read_all(self._file, _bytes(vector), offset)
            offset += vector.nbytes

    def free(self, page: FilePage) -> None:
        """Frees the page for reuse, and truncates the file if the page is at its end."""
        self._free = _joined([*self._free, page])
        if self._free[-1].stop == self._size:
            self._size = self._free.pop().offset
            os.ftruncate(self._file, self._size)

    def _allocate(self, num_bytes: int) -> FilePage:
        num_bytes = -(-num_bytes // _BLOCK) * _BLOCK
        for i, gap in enumerate(self._free):
            if gap.num_bytes >= num_bytes:
                rest = FilePage(gap.offset + num_bytes, gap.num_bytes - num_bytes)
                self._free[i : i + 1] = [rest] if rest.num_bytes else []
                return FilePage(gap.offset, num_bytes)
        self._size += num_bytes
        return FilePage(self._size - num_bytes, num_bytes)

    @property
    def _file(self) -> int:
        if self._opened is None:
            self._opened = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 (open as long as self)
            weakref.finalize(self, self._opened.close)
        return self._opened.fileno()

    def _open_now(self, directory: str) -> None:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            assert self._file >= 0
        except OSError as error:
            raise ValueError(f"page_directory {directory} cannot be written to: {error}") from None


def _joined(pages: list[FilePage]) -> list[FilePage]:
    joined: list[FilePage] = []
    for page in sorted(pages, key=lambda page: page.offset):
        if joined and joined[-1].stop == page.offset:
            page = FilePage(joined[-1].offset, joined.pop().num_bytes + page.num_bytes)
        joined.append(page)
    return joined


def _bytes(vector: Tensor) -> memoryview:
    """Returns the vector's memory. numpy would not do: it makes a storage impossible to resize (see Offload)."""
    assert vector.is_contiguous() and vector.device.type == "cpu"
    return memoryview((ctypes.c_ubyte * vector.nbytes).from_address(vector.data_ptr())).cast("B")


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _read_all(file: int, into: memoryview, offset: int) -> None:
    while into:
        num_bytes = os.preadv(file, [into], offset)
        if not num_bytes:
            raise OSError(f"the page file ends {len(into)} bytes before the page at {offset}")
        into, offset = into[num_bytes:], offset + num_bytes

"""PageFile: vectors on disk, in one file without a name."""

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
class Page:
    """Bytes offset : offset + num_bytes of the file, multiples of a block."""

    offset: int
    num_bytes: int

    @property
    def stop(self) -> int:
        return self.offset + self.num_bytes


class PageFile:
    """Pages of any size. Made on first use; as no directory lists it, it goes with this process however that ends.

    directory: None = the system's for temporary files. Raises ValueError on one that cannot be written to.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._opened: IO[bytes] | None = None
        self._free: list[Page] = []
        self._size = 0
        if directory is not None:
            self._open_now(directory)

    def write(self, vectors: Sequence[Tensor]) -> Page:
        """Raises OSError, such as on a full disk; nothing is kept then."""
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

    def read(self, page: Page, vectors: Sequence[Tensor]) -> None:
        """Fills the vectors that were written, in their order. Raises OSError."""
        offset = page.offset
        for vector in vectors:
            _read_all(self._file, _bytes(vector), offset)
            offset += vector.nbytes

    def free(self, page: Page) -> None:
        """Its bytes are for other pages, and at the end of the file given back to the disk."""
        self._free = _joined([*self._free, page])
        if self._free[-1].stop == self._size:
            self._size = self._free.pop().offset
            os.ftruncate(self._file, self._size)

    def _allocate(self, num_bytes: int) -> Page:
        """The first gap that is large enough, else the end of the file."""
        num_bytes = -(-num_bytes // _BLOCK) * _BLOCK
        for i, gap in enumerate(self._free):
            if gap.num_bytes >= num_bytes:
                rest = Page(gap.offset + num_bytes, gap.num_bytes - num_bytes)
                self._free[i : i + 1] = [rest] if rest.num_bytes else []
                return Page(gap.offset, num_bytes)
        self._size += num_bytes
        return Page(self._size - num_bytes, num_bytes)

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


def _joined(pages: list[Page]) -> list[Page]:
    """In their order; neighbours are one."""
    joined: list[Page] = []
    for page in sorted(pages, key=lambda page: page.offset):
        if joined and joined[-1].stop == page.offset:
            page = Page(joined[-1].offset, joined.pop().num_bytes + page.num_bytes)
        joined.append(page)
    return joined


def _bytes(vector: Tensor) -> memoryview:
    """Not by numpy: what it has seen can never be resized (see Offload)."""
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

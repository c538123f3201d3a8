"""Reads and writes safetensors files with NumPy alone, tensor by tensor.

bfloat16, which NumPy lacks, is given as its bits, uint16.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from ..bounds import load_json

_NUMPY_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_LENGTH_BYTES = 8  # of the number before the header: the header's size
_MAX_HEADER_BYTES = 100 << 20

CHECKSUMS = "crc32"
"""The metadata of a file with the checksums of its tensors, in the order of their names."""


@dataclass(frozen=True, eq=False)
class TensorEntry:
    """A tensor in the header of a file."""

    dtype: str
    """The name that safetensors has for it, such as F32."""
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, eq=False)
class FileTensor(TensorEntry):
    """A tensor of a file that is written.

    content: returns the numbers as arrays whose bytes follow each other in the file; called when the tensor is written,
    so that one is in memory at a time.
    """

    content: Callable[[], Iterable[np.ndarray]]

    @staticmethod
    def of(array: np.ndarray) -> "FileTensor":
        return FileTensor.stacked([array], array.shape)

    @staticmethod
    def stacked(arrays: Sequence[np.ndarray], shape: tuple[int, ...] | None = None) -> "FileTensor":
        """Returns a float32 tensor of equal arrays along a new first dimension."""
        assert all(array.dtype == np.float32 for array in arrays)
        shape = (len(arrays), *arrays[0].shape) if shape is None else shape
        return FileTensor("F32", shape, 4 * math.prod(shape), lambda: arrays)


class TensorFile(Mapping[str, np.ndarray]):
    """The tensors of a file, which is mapped into memory and read on access."""

    def __init__(self, path: Path) -> None:
        """Opens the file.

        Raises:
            ValueError: the file is damaged.
        """
        self.path = path
        self._header, start = _read_header(path)
        self.metadata: dict[str, str] = self._header.pop("__metadata__", {})
        self._bytes = np.memmap(path, np.uint8, "r")[start:] if path.stat().st_size > start else np.empty(0, np.uint8)
        if any(entry["data_offsets"][1] > len(self._bytes) for entry in self._header.values()):
            raise ValueError(f"{path} is damaged: it is shorter than its header says")

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a tensor. Raises ValueError if it is of another dtype than F32, F16 and BF16."""
        dtype = self.dtype(name)
        if dtype not in _NUMPY_TYPES:
            raise ValueError(f"{name} of {self.path} has dtype {dtype}: only {', '.join(_NUMPY_TYPES)} are read")
        return self._raw(name).view(_NUMPY_TYPES[dtype]).reshape(self.shape(name))

    def __iter__(self) -> Iterator[str]:
        """Yields the names in the order of the file."""
        return iter(sorted(self._header, key=lambda name: self._header[name]["data_offsets"]))

    def __len__(self) -> int:
        return len(self._header)

    def dtype(self, name: str) -> str:
        return self._header[name]["dtype"]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def is_whole(self) -> bool:
        """True if the tensors match their checksums, or the file has none. Reads all of it."""
        expected = self.metadata.get(CHECKSUMS)
        return expected is None or expected == checksums_as_text({name: crc32(self._raw(name).data) for name in self})

    def copied(self, name: str) -> FileTensor:
        """Returns the tensor, of any dtype, for another file."""
        raw = self._raw(name)
        return FileTensor(self.dtype(name), self.shape(name), len(raw), lambda: [raw])

    def _raw(self, name: str) -> np.ndarray:
        start, stop = self._header[name]["data_offsets"]
        return self._bytes[start:stop]


def write_tensors(path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a file, in the place of any there once it is complete."""
    header = encoded_header(tensors, metadata or {"format": "pt"})
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(header)
        for tensor in tensors.values():
            for array in tensor.content():
                file.write(np.ascontiguousarray(array).data)
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    assert new.stat().st_size == len(header) + num_bytes, "a tensor has other bytes than it said"
    new.replace(path)


def checksums_as_text(checksums: Mapping[str, int]) -> str:
    """Returns the checksums as text, whose length does not depend on them."""
    return " ".join(f"{checksums[name]:08x}" for name in sorted(checksums))


def encoded_header(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Returns what a file begins with. The tensors follow, in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, tensor in tensors.items():
        offsets = [position, position + tensor.num_bytes]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded


def _read_header(path: Path) -> tuple[dict[str, dict], int]:
    """Returns the header and the position at which the numbers start."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size <= _MAX_HEADER_BYTES:
            try:
                return load_json(file.read(size)), _LENGTH_BYTES + size
            except ValueError:
                pass
    raise ValueError(f"{path} is not a safetensors file")

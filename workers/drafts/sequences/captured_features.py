"""Captured features of one sequence, stored in a file that is named by the hash of everything that determines them."""

import hashlib
import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ....schemas.adapters.tensor_file import (
    CHECKSUMS,
    TensorEntry,
    TensorFile,
    checksums_as_text,
    encoded_header,
)
from ....schemas.errors import OperationError
from ...shapes.draft_sizes import FeatureColumn, feature_columns, token_bytes
from .target_form import TargetForm

logger = logging.getLogger(__name__)

_DIGITS = 32
_MAX_REMEMBERED = 100_000
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32"}


@dataclass(frozen=True, eq=False)
class FeatureKind:
    """Everything that determines features, apart from the tokens.

    target: the version of its weights. layers: those that are captured.
    form: in which the target's distribution is stored, None = it is not stored.
    hidden, dtype: the target's hidden size and precision.
    """

    target: str
    layers: tuple[int, ...]
    form: TargetForm | None
    hidden: int
    dtype: torch.dtype

    @property
    def columns(self) -> Mapping[str, FeatureColumn]:
        return feature_columns(len(self.layers), self.hidden, {} if self.form is None else self.form.columns)

    @property
    def stores_logits(self) -> bool:
        return self.form is not None and self.form.stores_logits

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.columns, self.dtype.itemsize)

    @property
    def parts(self) -> str:
        return ", ".join(map(str, self.layers)) + (f" with {self.form.name}" if self.form else "")

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def dtype_of(self, column: FeatureColumn) -> torch.dtype:
        return self.dtype if column.dtype is None else getattr(torch, column.dtype)

    def metadata(self) -> dict[str, str]:
        return {"target": self.target, "parts": self.parts, "hidden": str(self.hidden), "dtype": self.precision}

    def address(self, tokens: np.ndarray) -> str:
        """Returns the address of the features of these tokens, int32 [T]."""
        digest = hashlib.sha256(" ".join(self.metadata().values()).encode())
        digest.update(np.ascontiguousarray(tokens, np.int32).tobytes())
        return digest.hexdigest()[:_DIGITS]

    def difference(self, metadata: Mapping[str, str]) -> str | None:
        """Returns how stored features with this metadata differ from this kind, and what to do; None if they do not."""
        own, again = self.metadata(), "capture them again with this draft"
        if "parts" not in metadata:
            return f"captured by an earlier version of the server: {again}"
        if own["parts"] != metadata["parts"]:
            return f"captured from layers {metadata['parts']}, but the draft reads {self.parts}: {again}"
        if own["dtype"] != metadata["dtype"]:
            return f"captured in {metadata['dtype']}, but the draft's target runs in {self.precision}: {again}"
        if own["target"] != metadata["target"]:
            return (
                f"captured from target {metadata['target']}, but the draft's target is {self.target}: {again}, or"
                " set_target to a checkpoint of the weights that they were captured from"
            )
        return None


def address_of(feature_ref: str) -> str:
    """Returns the address in a feature_ref, its middle part; "" if the reference is malformed."""
    return feature_ref.split("-")[1] if feature_ref.count("-") == 2 else ""


class CapturedFeatures:
    """The open file with the features of one sequence.

    num_bytes: its size on disk. signature: changes whenever the file is written.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file. Raises OSError or SafetensorError."""
        # Tensors are read when they are needed. The open file keeps them readable even if it is deleted meanwhile.
        self._file = safe_open(path, framework="pt", device="cpu")
        self._path = path
        self.address = path.stem
        status = path.stat()
        self.num_bytes = status.st_size
        self.signature = status.st_ino, status.st_mtime_ns

    @staticmethod
    def find(directory: Path, address: str) -> "CapturedFeatures | None":
        """Returns the features at an address, None if they are missing or incomplete, as after a power cut."""
        if not address.isalnum():
            return None
        try:
            return CapturedFeatures(_path(directory, address))
        except (OSError, SafetensorError):
            return None

    @staticmethod
    def store(
        directory: Path, address: str, kind: FeatureKind, num_tokens: int, chunks: Iterable[Mapping[str, Tensor]]
    ) -> "CapturedFeatures":
        """Stores features, unless the address has a complete file: equal addresses mean equal contents.

        Args:
            chunks: the tensors by name, [m, ...] of some tokens after the other, `num_tokens` in all.
        Raises:
            OSError: the file cannot be written.
        """
        found = CapturedFeatures.find(directory, address)
        if found is not None and found.is_complete(kind, num_tokens) and found.is_whole():
            return found
        staging = directory / f".staging-{secrets.token_hex(8)}"
        try:
            _write(staging, kind, num_tokens, chunks)
            staging.rename(_path(directory, address))
            return CapturedFeatures(_path(directory, address))
        except SafetensorError as error:
            raise OSError(str(error)) from None
        finally:
            staging.unlink(missing_ok=True)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor, [T, ...], in the host's memory. It is mapped: only the rows that are used are read."""
        return self._file.get_tensor(name)

    def is_complete(self, kind: FeatureKind, num_tokens: int) -> bool:
        """True if the file has all tensors of this kind for this many tokens. Reads no tensor."""
        shapes = {name: self._file.get_slice(name).get_shape() for name in self._file.keys()}  # noqa: SIM118 (no mapping)
        return shapes == {name: [num_tokens, column.width] for name, column in kind.columns.items()}

    def is_whole(self) -> bool:
        """True if the tensors match their checksums, which earlier versions did not write. Reads the whole file."""
        try:
            return TensorFile(self._path).is_whole()
        except (OSError, ValueError):
            return False

    def check(self, kind: FeatureKind, address: str, number: int) -> None:
        """Raises OperationError if these are not the features of this kind at this address, for datum `number`."""
        if self.address == address:
            return
        other_tokens = "captured from other tokens than its model_input: capture these tokens, or send those"
        difference = kind.difference(self._file.metadata()) or other_tokens
        raise OperationError(f"datum {number}: its feature_ref names features {difference}")


class Checksums:
    """Compares captured features with their checksums, once for each file until it changes."""

    def __init__(self) -> None:
        # By address, the signatures of files that match.
        self._matching: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def match(self, features: CapturedFeatures) -> bool:
        """True if the file is not damaged."""
        if self._matching.get(features.address) == features.signature:
            return True
        if not features.is_whole():
            logger.error("the captured features %s are damaged: the target runs instead", features.address)
            return False
        self._matching[features.address] = features.signature
        if len(self._matching) > _MAX_REMEMBERED:
            self._matching.popitem(last=False)
        return True


def _path(directory: Path, address: str) -> Path:
    return directory / f"{address}.safetensors"


def _write(path: Path, kind: FeatureKind, num_tokens: int, chunks: Iterable[Mapping[str, Tensor]]) -> None:
    """Writes a file in safetensors' format, chunk by chunk, so that no tensor is in memory as a whole."""
    dtypes = {name: kind.dtype_of(column) for name, column in kind.columns.items()}
    # Wide numbers first: each tensor must begin at a multiple of its numbers' size.
    names = sorted(dtypes, key=lambda name: -dtypes[name].itemsize)
    shapes = {name: (num_tokens, kind.columns[name].width) for name in names}
    entries = {
        name: TensorEntry(_DTYPES[dtypes[name]], shapes[name], math.prod(shapes[name]) * dtypes[name].itemsize)
        for name in names
    }
    checksums = dict.fromkeys(names, 0)
    header = encoded_header(entries, kind.metadata() | {CHECKSUMS: checksums_as_text(checksums)})
    ends = accumulate((entry.num_bytes for entry in entries.values()), initial=len(header))
    positions = dict(zip(names, ends, strict=False))
    with path.open("wb") as file:
        file.write(header)
        for chunk in chunks:
            for name, tensor in chunk.items():
                content = tensor.contiguous().cpu().view(torch.uint8).numpy().data
                checksums[name] = crc32(content, checksums[name])
                file.seek(positions[name])
                positions[name] += file.write(content)
        file.seek(0)
        file.write(encoded_header(entries, kind.metadata() | {CHECKSUMS: checksums_as_text(checksums)}))

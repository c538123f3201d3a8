"""Captured features of one sequence, stored in a file that is named by the hash of everything that determines them."""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ....schemas.errors import OperationError

CAPTURED = "captured"

TargetRepr = Literal["hidden_state"]
"""The form in which the target's distribution is stored: as final hidden states [T, hidden]. Logits are computed from
these when they are needed, since they would take more space than everything else."""

_DIGITS = 32


@dataclass(frozen=True)
class FeatureKind:
    """Everything that determines features, apart from the tokens.

    target: the version of its weights. layers: those that are captured.
    target_repr: None = the target's distribution is not stored. hidden, dtype: the target's hidden size and precision.
    """

    target: str
    layers: tuple[int, ...]
    target_repr: TargetRepr | None
    hidden: int
    dtype: torch.dtype

    @property
    def widths(self) -> Mapping[str, int]:
        """Returns the numbers per token of each tensor, by name."""
        target = {} if self.target_repr is None else {self.target_repr: self.hidden}
        return {CAPTURED: len(self.layers) * self.hidden} | target

    @property
    def token_bytes(self) -> int:
        return sum(self.widths.values()) * self.dtype.itemsize

    @property
    def parts(self) -> str:
        """Returns the captured parts of the target, as text."""
        return ", ".join(map(str, self.layers)) + (f" with {self.target_repr}" if self.target_repr else "")

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def metadata(self) -> dict[str, str]:
        return {"target": self.target, "parts": self.parts, "hidden": str(self.hidden), "dtype": self.precision}

    def address(self, tokens: np.ndarray) -> str:
        """Returns the address of the features of these tokens, int32 [T]."""
        digest = hashlib.sha256(" ".join(self.metadata().values()).encode())
        digest.update(np.ascontiguousarray(tokens, np.int32).tobytes())
        return digest.hexdigest()[:_DIGITS]

    def difference(self, metadata: Mapping[str, str]) -> str | None:
        """Returns how stored features with this metadata differ from this kind, None if they do not."""
        own = self.metadata()
        if "parts" not in metadata:
            return "captured by an earlier version of the server"
        if own["parts"] != metadata["parts"]:
            return f"captured from layers {metadata['parts']}, but the draft reads {self.parts}"
        if own["dtype"] != metadata["dtype"]:
            return f"captured in {metadata['dtype']}, but the draft's target runs in {self.precision}"
        if own["target"] != metadata["target"]:
            return f"captured from target {metadata['target']}, but the draft's target is {self.target}"
        return None


def address_of(feature_ref: str) -> str:
    """Returns the address in a feature_ref, its middle part; "" if the reference is malformed."""
    return feature_ref.split("-")[1] if feature_ref.count("-") == 2 else ""


class CapturedFeatures:
    """The open file with the features of one sequence.

    num_bytes: its size on disk.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file. Raises OSError or SafetensorError."""
        # Tensors are read when they are needed. The open file keeps them readable even if it is deleted meanwhile.
        self._file = safe_open(path, framework="pt", device="cpu")
        self.address = path.stem
        self.num_bytes = path.stat().st_size

    @staticmethod
    def find(directory: Path, address: str) -> "CapturedFeatures | None":
        """Returns the features at an address, None if they do not exist or were not written completely, as after a
        power cut."""
        if not address.isalnum():
            return None
        try:
            return CapturedFeatures(_path(directory, address))
        except (OSError, SafetensorError):
            return None

    @staticmethod
    def store(directory: Path, address: str, kind: FeatureKind, tensors: Mapping[str, Tensor]) -> "CapturedFeatures":
        """Stores features, unless the address has a complete file: equal addresses mean equal contents.

        Args:
            tensors: by name, [T, ...].
        Raises:
            OSError: the file cannot be written.
        """
        found = CapturedFeatures.find(directory, address)
        if found is not None and found.is_complete(kind, len(tensors[CAPTURED])):
            return found
        staging = directory / f".staging-{secrets.token_hex(8)}"
        try:
            save_file({name: each.cpu().contiguous() for name, each in tensors.items()}, staging, kind.metadata())
            staging.rename(_path(directory, address))
            return CapturedFeatures(_path(directory, address))
        except (OSError, SafetensorError) as error:
            staging.unlink(missing_ok=True)
            raise error if isinstance(error, OSError) else OSError(str(error)) from None

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor, [T, ...]."""
        return self._file.get_tensor(name)

    def is_complete(self, kind: FeatureKind, num_tokens: int) -> bool:
        """True if the file has all tensors of this kind for this many tokens. Reads no tensor."""
        shapes = {name: self._file.get_slice(name).get_shape() for name in self._file.keys()}  # noqa: SIM118 (no mapping)
        return shapes == {name: [num_tokens, width] for name, width in kind.widths.items()}

    def check(self, kind: FeatureKind, address: str, number: int) -> None:
        """Raises OperationError if these are not the features of this kind at this address. `number` is the datum's,
        for the message."""
        if self.address == address:
            return
        difference = kind.difference(self._file.metadata()) or "captured from other tokens than its model_input"
        raise OperationError(
            f"datum {number}: its feature_ref names features {difference}: capture them again with this draft, or"
            " set_target to a checkpoint of the weights that they were captured from"
        )


def _path(directory: Path, address: str) -> Path:
    return directory / f"{address}.safetensors"

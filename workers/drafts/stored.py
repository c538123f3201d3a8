"""Stored: what a target had inside for one sequence, in a file whose name is the hash of all that decides it."""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...schemas.errors import OperationError

LAST = "last"
"""Among layers: the last hidden states, of which the target's words are made."""

_DIGITS = 32


@dataclass(frozen=True)
class FeatureKind:
    """What decides features beside the tokens. target: its version. layers: those that are captured, and LAST. dtype:
    the target's."""

    target: str
    layers: tuple[str, ...]
    dtype: str

    @staticmethod
    def of(metadata: Mapping[str, str]) -> "FeatureKind":
        return FeatureKind(metadata["target"], tuple(metadata["layers"].split(",")), metadata["dtype"])

    def metadata(self) -> dict[str, str]:
        return {"target": self.target, "layers": ",".join(self.layers), "dtype": self.dtype}

    def address(self, tokens: np.ndarray) -> str:
        """tokens: int32 [T]."""
        digest = hashlib.sha256(" ".join(self.metadata().values()).encode())
        digest.update(np.ascontiguousarray(tokens, np.int32).tobytes())
        return digest.hexdigest()[:_DIGITS]

    def difference(self, other: "FeatureKind") -> str | None:
        """Of what a draft is to be told, to what there is, in words."""
        if self.layers != other.layers:
            return f"of layers {', '.join(other.layers)}, and the draft reads {', '.join(self.layers)}"
        if self.dtype != other.dtype:
            return f"{other.dtype}, and the draft's target runs in {self.dtype}"
        if self.target != other.target:
            return f"of target {other.target}, and the draft is aimed at {self.target}"
        return None


def address_of(feature_ref: str) -> str:
    """Of the features, as the server has it in the middle of its references; "" of what is none."""
    return feature_ref.split("-")[1] if feature_ref.count("-") == 2 else ""


class Stored:
    """The features of one sequence. num_bytes: on disk."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, SafetensorError."""
        # Read when they are needed; until then they are there, whatever becomes of the file.
        self._file = safe_open(path, framework="pt", device="cpu")
        self.address = path.stem
        self.num_bytes = path.stat().st_size

    @staticmethod
    def find(directory: Path, address: str) -> "Stored | None":
        """None where there are none, or what there is was never finished, as after a power cut."""
        if not address.isalnum():
            return None
        try:
            return Stored(_path(directory, address))
        except (OSError, SafetensorError):
            return None

    @staticmethod
    def keep(directory: Path, address: str, kind: FeatureKind, tensors: Mapping[str, Tensor]) -> "Stored":
        """In place of nothing: what has the same address is the same. tensors: by name, [T, ...]. Raises OSError."""
        if (found := Stored.find(directory, address)) is not None:
            return found
        staging = directory / f".staging-{secrets.token_hex(8)}"
        try:
            save_file({name: each.cpu().contiguous() for name, each in tensors.items()}, staging, kind.metadata())
            staging.rename(_path(directory, address))
            return Stored(_path(directory, address))
        except (OSError, SafetensorError) as error:
            staging.unlink(missing_ok=True)
            raise error if isinstance(error, OSError) else OSError(str(error)) from None

    def tensor(self, name: str) -> Tensor | None:
        """[T, ...], of these tokens; None where it was not kept."""
        return self._file.get_tensor(name) if name in self._file.keys() else None  # noqa: SIM118 (it is no mapping)

    def check(self, kind: FeatureKind, address: str, number: int) -> None:
        """Raises OperationError where they are not those of this kind at this address. number: of the datum."""
        if self.address == address:
            return
        difference = kind.difference(FeatureKind.of(self._file.metadata())) or "of other tokens than its model_input"
        raise OperationError(
            f"datum {number}: its feature_ref is of features {difference}: capture them again with this draft, or"
            " set_target to a checkpoint of the weights that made them"
        )


def _path(directory: Path, address: str) -> Path:
    return directory / f"{address}.safetensors"

"""Stored: what a target had inside for one sequence, in a file whose name is the hash of all that decides it."""

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
"""How what the target says is told: by its last hidden states [T, hidden], of which its output head makes the logits.
Logits, of all tokens or of a draft's, are made of these as they are needed: they would take more room than all else."""

_DIGITS = 32


@dataclass(frozen=True)
class FeatureKind:
    """What decides features beside the tokens. target: its version. layers: those that are captured. target_repr: None
    = what the target says is not told. hidden, dtype: the target's size and precision."""

    target: str
    layers: tuple[int, ...]
    target_repr: TargetRepr | None
    hidden: int
    dtype: torch.dtype

    @property
    def widths(self) -> Mapping[str, int]:
        """By tensor, how many numbers it has of a token."""
        told = {} if self.target_repr is None else {self.target_repr: self.hidden}
        return {CAPTURED: len(self.layers) * self.hidden} | told

    @property
    def token_bytes(self) -> int:
        return sum(self.widths.values()) * self.dtype.itemsize

    @property
    def parts(self) -> str:
        """What of the target it is."""
        return ", ".join(map(str, self.layers)) + (f" with {self.target_repr}" if self.target_repr else "")

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def metadata(self) -> dict[str, str]:
        return {"target": self.target, "parts": self.parts, "hidden": str(self.hidden), "dtype": self.precision}

    def address(self, tokens: np.ndarray) -> str:
        """tokens: int32 [T]."""
        digest = hashlib.sha256(" ".join(self.metadata().values()).encode())
        digest.update(np.ascontiguousarray(tokens, np.int32).tobytes())
        return digest.hexdigest()[:_DIGITS]

    def difference(self, metadata: Mapping[str, str]) -> str | None:
        """Of what a draft is to be told, to what there is, in words."""
        own = self.metadata()
        if "parts" not in metadata:
            return "of an earlier version of the server"
        if own["parts"] != metadata["parts"]:
            return f"of layers {metadata['parts']}, and the draft reads {self.parts}"
        if own["dtype"] != metadata["dtype"]:
            return f"{metadata['dtype']}, and the draft's target runs in {self.precision}"
        if own["target"] != metadata["target"]:
            return f"of target {metadata['target']}, and the draft is aimed at {self.target}"
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
        """In place of nothing: what has the same address is the same, if it is whole. tensors: by name, [T, ...].
        Raises OSError."""
        found = Stored.find(directory, address)
        if found is not None and found.is_whole(kind, len(tensors[CAPTURED])):
            return found
        staging = directory / f".staging-{secrets.token_hex(8)}"
        try:
            save_file({name: each.cpu().contiguous() for name, each in tensors.items()}, staging, kind.metadata())
            staging.rename(_path(directory, address))
            return Stored(_path(directory, address))
        except (OSError, SafetensorError) as error:
            staging.unlink(missing_ok=True)
            raise error if isinstance(error, OSError) else OSError(str(error)) from None

    def tensor(self, name: str) -> Tensor:
        """[T, ...], of these tokens."""
        return self._file.get_tensor(name)

    def is_whole(self, kind: FeatureKind, num_tokens: int) -> bool:
        """Whether all of this kind is there of so many tokens. Reads no tensor."""
        shapes = {name: self._file.get_slice(name).get_shape() for name in self._file.keys()}  # noqa: SIM118 (no mapping)
        return shapes == {name: [num_tokens, width] for name, width in kind.widths.items()}

    def check(self, kind: FeatureKind, address: str, number: int) -> None:
        """Raises OperationError where they are not those of this kind at this address. number: of the datum."""
        if self.address == address:
            return
        difference = kind.difference(self._file.metadata()) or "of other tokens than its model_input"
        raise OperationError(
            f"datum {number}: its feature_ref is of features {difference}: capture them again with this draft, or"
            " set_target to a checkpoint of the weights that made them"
        )


def _path(directory: Path, address: str) -> Path:
    return directory / f"{address}.safetensors"

"""Versions of target weights: hashes that show whether captured features were computed by the target that a draft is
trained for."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ....schemas.adapters.model_files import model_directory
from ...models.model import BaseModel
from ...state.trainable import Trainable

_DIGITS = 16
_CHUNK = 1 << 22
_BLOCK = 1 << 16

# Bytes hashed at the beginning of each weight file, where the tensor names are, and at its end.
_ENDS_BYTES = 1 << 16
_WEIGHTS = (".safetensors", ".gguf", ".bin")


class TargetVersions:
    """The versions of a base model and of models trained on it; those of the latter must be on the device."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base

    def of(self, target: Trainable | None) -> str:
        """Returns the version of this rank's part of the target, None = the bare base model.

        That of a trained model is a hash of the base model's version and of its own weights, which must be on the
        device. The seed is left out.
        """
        if target is None:
            return self._of_base
        shape = target.training.model_dump_json(exclude={"seed"})
        digest = hashlib.sha256(f"{self._of_base} {target.program.role} {shape}".encode())
        for piece in _pieces(target.weights):
            digest.update(piece.numpy().data)
        return digest.hexdigest()[:_DIGITS]

    @cached_property
    def _of_base(self) -> str:
        """The version of the bare base model: a hash of its config, its precision and samples of its weight files."""
        base = self._base
        config = {name: value for name, value in base.config.to_dict().items() if name != "_name_or_path"}
        digest = hashlib.sha256(f"{json.dumps(config, sort_keys=True, default=str)} {base.loaded.precision}".encode())
        directory = model_directory(base.source)
        for path in sorted(directory.iterdir()) if directory else ():
            if path.suffix in _WEIGHTS:
                digest.update(f"{path.name} {path.stat().st_size}".encode())
                for piece in _ends(path):
                    digest.update(piece)
        return digest.hexdigest()[:_DIGITS]


def version_of_parts(versions: Sequence[str]) -> str:
    """Returns the whole model's version from those of all ranks, which are equal if each has all of it."""
    if len(set(versions)) == 1:
        return versions[0]
    return hashlib.sha256(" ".join(versions).encode()).hexdigest()[:_DIGITS]


def _ends(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield file.read(_ENDS_BYTES)
        file.seek(max(0, path.stat().st_size - _ENDS_BYTES))
        yield file.read()


@torch.no_grad()
def _pieces(vector: Tensor) -> Iterator[Tensor]:
    """Yields host tensors that identify a float32 vector.

    On a CPU these are the vector itself. Copying it from a GPU would take longer than a pass, so there they are sums of
    each _BLOCK numbers times random odd factors, modulo 2^64.

    Thorup, High speed hashing for integers and strings (2015), https://arxiv.org/abs/1504.06804, section 3.
    """
    chunks = vector.flatten().split(_CHUNK)
    if vector.device.type == "cpu":
        yield from chunks
        return
    yield from (sums_of(chunk).cpu() for chunk in chunks)


def sums_of(chunk: Tensor) -> Tensor:
    """Hashes float32 [n] to int64 [blocks, 2]. Hashes of different vectors are equal with probability 2^-64."""
    factors = np.random.PCG64(0).random_raw(2 * _BLOCK).view(np.int64) | 1
    by_block = pad(chunk, (0, -len(chunk) % _BLOCK)).view(torch.int32).unflatten(0, (-1, _BLOCK)).long()
    both = torch.from_numpy(factors).to(chunk.device).unflatten(0, (2, _BLOCK))
    return torch.stack([(by_block * each).sum(1) for each in both], dim=1)

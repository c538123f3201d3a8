"""Versions: by what features that were captured are known to be of the very target that a draft is aimed at."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..learner import Learner
from ..model import BaseModel
from ..parallel.shape import model_directory

_DIGITS = 16
_CHUNK = 1 << 24

# Of each file of weights as much of its beginning, where its names are, and of its end.
_ENDS_BYTES = 1 << 16
_WEIGHTS = (".safetensors", ".gguf", ".bin")


def base_version(base: BaseModel) -> str:
    """Of the bare base model: its config, the precision it runs in, and the files that it was loaded from."""
    config = {name: value for name, value in base.config.to_dict().items() if name != "_name_or_path"}
    digest = hashlib.sha256(f"{json.dumps(config, sort_keys=True, default=str)} {base.precision}".encode())
    directory = model_directory(base.source)
    for path in sorted(directory.iterdir()) if directory else ():
        if path.suffix in _WEIGHTS:
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            for piece in _ends(path):
                digest.update(piece)
    return digest.hexdigest()[:_DIGITS]


def learned_version(base: str, model: Learner) -> str:
    """Of what a model has learned on the base of this version: of this rank's part of it, which is on the device. The
    seed that it began with does not matter."""
    shape = model.training.model_dump_json(exclude={"seed"})
    digest = hashlib.sha256(f"{base} {model.program.role} {shape}".encode())
    for piece in _pieces(model.weights):
        digest.update(piece.numpy().tobytes())
    return digest.hexdigest()[:_DIGITS]


def version_of_parts(versions: Sequence[str]) -> str:
    """versions: of all ranks; one that all of them have is that of the whole, which each has."""
    if len(set(versions)) == 1:
        return versions[0]
    return hashlib.sha256(" ".join(versions).encode()).hexdigest()[:_DIGITS]


def _ends(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield file.read(_ENDS_BYTES)
        file.seek(max(0, path.stat().st_size - _ENDS_BYTES))
        yield file.read()


def _pieces(vector: Tensor) -> Iterator[Tensor]:
    with torch.no_grad():
        yield from (piece.cpu().contiguous() for piece in vector.detach().flatten().split(_CHUNK))

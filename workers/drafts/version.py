"""Versions: by what features that were captured are known to be of the very target that a draft is aimed at."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..models.model import BaseModel
from ..shapes.model_shape import model_directory
from ..state.trainable import Learner

_DIGITS = 16
_CHUNK = 1 << 22
_BLOCK = 1 << 16

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
        digest.update(piece.numpy().data)
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


@torch.no_grad()
def _pieces(vector: Tensor) -> Iterator[Tensor]:
    """What tells a float32 vector from others, in host memory: itself; of a GPU, from where it would take longer than
    a pass, sums of each _BLOCK numbers times odd factors, modulo 2^64.

    Thorup, High speed hashing for integers and strings (2015), https://arxiv.org/abs/1504.06804, section 3.
    """
    chunks = vector.flatten().split(_CHUNK)
    if vector.device.type == "cpu":
        yield from chunks
        return
    yield from (sums_of(chunk).cpu() for chunk in chunks)


def sums_of(chunk: Tensor) -> Tensor:
    """float32 [n] -> int64 [blocks, 2], which are the same of two vectors by a chance of about 2^-64."""
    factors = np.random.PCG64(0).random_raw(2 * _BLOCK).view(np.int64) | 1
    by_block = pad(chunk, (0, -len(chunk) % _BLOCK)).view(torch.int32).unflatten(0, (-1, _BLOCK)).long()
    both = torch.from_numpy(factors).to(chunk.device).unflatten(0, (2, _BLOCK))
    return torch.stack([(by_block * each).sum(1) for each in both], dim=1)

"""Merges an exported adapter into the files of its base model, tensor by tensor: for programs without adapters.

Works on the files alone, so any model family and any size is merged in the memory of a few rows of one weight.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..schemas.adapter_files import CONFIG, DESCRIPTION, WEIGHTS, Pair, pairs_of
from ..schemas.tensor_file import FileTensor, TensorFile, write_tensors

_ROWS = 4096  # that are in memory at a time
_INDEX = "model.safetensors.index.json"

# Parts of paths that differ between an adapter, which has peft's names, and the files of some models.
_NAMES_IN_FILES = (
    (".mlp.experts.", ".block_sparse_moe.experts."),
    (".shared_experts.", ".shared_mlp."),
    ("lm_head", "embed_out"),
)


def merge_into_base(adapter: Path, base: Path, merged: Path) -> None:
    """Writes a model whose weights are those of the base model plus the adapter's.

    If the output head is tied to the embedding, the new model has a head of its own, because adapters change the head
    alone; its config.json says so.

    Args:
        adapter: a directory of `RestClient.export_checkpoint`.
        base: the directory of the base model, with safetensors files of 16 or 32 bit floats.
        merged: a new directory.
    Raises:
        ValueError: the adapter is a critic's, the two do not belong together, or the base model's weights are
            quantized. The message names the weight.
    """
    merging = _Merging(adapter, base)
    merged.mkdir(parents=True, exist_ok=True)
    for path in base.iterdir():
        if (
            path.is_file()
            and path.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
            and path.name != _INDEX
        ):
            shutil.copyfile(path, merged / path.name)
    for file in merging.files:
        write_tensors(merged / file.path.name, merging.tensors_of(file), file.metadata)
    if len(merging.files) > 1:
        _write_index(merged, [file.path.name for file in merging.files])
    if merging.new_head is not None:
        _untie(merged / "config.json")


class _Merging:
    """Finds the weight of each pair of matrices.

    files: of the base model. new_head: the name of the head's weight if it is added, because the base model has only
    its embedding.
    """

    def __init__(self, adapter: Path, base: Path) -> None:
        config = json.loads((adapter / CONFIG).read_text())
        if config.get("modules_to_save"):
            raise ValueError(f"{adapter} is the adapter of a critic, whose head no base model has: load it with peft")
        description = json.loads((adapter / DESCRIPTION).read_text())
        self._config = config
        self.files = [TensorFile(path) for path in sorted(base.glob("*.safetensors"))]
        if not self.files:
            raise ValueError(f"{base} has no safetensors files: name the directory of the base model")
        self._owners = {name: file for file in self.files for name in file}
        self.new_head: str | None = None
        self._embedding = ""
        pairs = pairs_of(TensorFile(adapter / WEIGHTS))
        self._pairs: dict[str, Pair] = {}
        for path, pair in pairs.items():
            self._pairs[self._weight_of(path, pair, description.get("tied_head", {}))] = pair

    def tensors_of(self, file: TensorFile) -> dict[str, FileTensor]:
        """Returns the merged tensors that replace those of a file of the base model."""
        tensors = {name: self._merged(file, name, self._pairs.get(name)) for name in file}
        if self.new_head is not None and self._embedding in file:
            tensors[self.new_head] = self._merged(file, self._embedding, self._pairs[self.new_head])
        return tensors

    def _weight_of(self, path: str, pair: Pair, tied_head: Mapping[str, str]) -> str:
        """Returns the name of the weight that the pair adapts."""
        shape = len(pair[1]), pair[0].shape[1]
        names = [f"{path}.weight", *(f"{path.replace(ours, theirs)}.weight" for ours, theirs in _NAMES_IN_FILES)]
        found = next((name for name in names if name in self._owners), None)
        if path == tied_head.get("head"):
            # Files that have a tied head all the same are not to be trusted with it.
            self.new_head = found = f"{path}.weight"
            self._embedding = self._find_embedding(tied_head["embedding"])
        if found is None:
            raise ValueError(f"the base model has no weight {names[0]}: name the base model of this adapter")
        weight = self._embedding if found == self.new_head else found
        theirs = self._owners[weight][weight].shape
        if theirs != shape:
            raise ValueError(
                f"{weight} of the base model has shape {list(theirs)}, and the adapter is for {list(shape)}: name the"
                " base model of this adapter"
            )
        return found

    def _find_embedding(self, path: str) -> str:
        """Returns the name of the embedding's weight, which some files have without its first part."""
        for name in (f"{path}.weight", f"{path.partition('.')[2]}.weight"):
            if name in self._owners:
                return name
        raise ValueError(f"the base model has no weight {path}.weight: name the base model of this adapter")

    def _merged(self, file: TensorFile, name: str, pair: Pair | None) -> FileTensor:
        copied = file.copied(name)
        if pair is None:
            return copied
        values = file[name]
        return FileTensor(copied.dtype, copied.shape, copied.num_bytes, partial(self._sums, values, copied.dtype, pair))

    def _sums(self, values: np.ndarray, dtype: str, pair: Pair) -> Iterator[np.ndarray]:
        """Yields the sums of some rows after the others, rounded to the dtype of the weight."""
        a, b = pair
        scale = self._config["lora_alpha"] / self._config["r"]
        for start in range(0, len(values), _ROWS):
            rows = slice(start, start + _ROWS)
            yield _from_float32(_to_float32(values[rows], dtype) + scale * (b[rows] @ a), dtype)


def _to_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds to the nearest number, ties to even."""
    if dtype != "BF16":
        return values.astype(np.float16 if dtype == "F16" else np.float32)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _write_index(directory: Path, names: list[str]) -> None:
    files = [TensorFile(directory / name) for name in names]
    index = {
        "metadata": {"total_size": sum(file.copied(name).num_bytes for file in files for name in file)},
        "weight_map": {name: file.path.name for file in files for name in file},
    }
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _untie(path: Path) -> None:
    config: dict[str, Any] = json.loads(path.read_text())
    config["tie_word_embeddings"] = False
    if isinstance(text := config.get("text_config"), dict):
        text["tie_word_embeddings"] = False
    path.write_text(json.dumps(config, indent=2) + "\n")

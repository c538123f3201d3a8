"""Merges an exported adapter into the files of its base model, tensor by tensor: for programs without adapters.

Works on the files alone, so any model family and any size is merged in the memory of a few rows of one weight.
"""

import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..bounds import load_json
from .adapter_files import refusal_by_peft
from .peft import CONFIG, DESCRIPTION, OF_ALL_EXPERTS, OF_EXPERT, WEIGHTS, Pair, pairs_of, split_experts
from .tensor_file import FileTensor, TensorFile, write_tensors

_ROWS = 4096  # that are in memory at a time
_INDEX = "model.safetensors.index.json"
# The weights [experts, out, in] in the files of some models; outputs of gate and up follow each other.
_STACKED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
# Parts of paths that differ between an adapter, which has peft's names, and the files of some models.
_NAMES_IN_FILES = (
    (".mlp.experts.", ".block_sparse_moe.experts."),
    (".shared_experts.", ".shared_mlp."),
    ("lm_head", "embed_out"),
    ("model.", "backbone."),
    ("lm_head", "language_model.lm_head"),
    ("model.language_model.", "language_model.model."),
    ("model.language_model.", "language_model.model.encoder."),  # of Qianfan-OCR, as transformers saves it
    ("language_model.model.", "language_model.backbone."),
    ("model.language_model.", "model."),
)
# All that differ in the files of EXAONE 3, and of Sarvam.
_NAMES_IN_RELEASES = (
    (
        ("model.embed_tokens", "transformer.wte"),
        ("model.layers.", "transformer.h."),
        (".self_attn.o_proj", ".self_attn.out_proj"),
        (".self_attn.", ".attn.attention."),
        (".mlp.gate_proj", ".mlp.c_fc_0"),
        (".mlp.up_proj", ".mlp.c_fc_1"),
        (".mlp.down_proj", ".mlp.c_proj"),
    ),
    (
        ("model.embed_tokens", "model.word_embeddings"),
        (".self_attn.o_proj", ".self_attn.dense"),
        (".self_attn.", ".attention."),
    ),
)
# Sarvam's weight of queries, keys and values, whose rows follow each other.
_OF_ATTENTION = re.compile(r"(?P<layer>.+)\.self_attn\.(?P<linear>[qkv])_proj")
_NAMES_OF_ALL_EXPERTS = (("experts.gate_up_proj", "input_linear.weight"), ("experts.down_proj", "output_linear.weight"))


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
            quantized or not all there. The message names the weight or file.
        OSError: such as a full disk.

    If it raises, `merged` holds no files.
    """
    try:
        merging = _Merging(adapter, base)
    except ValueError:
        if (method := packing_of(base)) is None:
            raise
        raise ValueError(
            f"{base} has packed weights (quant_method {method}), into which nothing is merged: name a directory with"
            " the dequantized model in 16 or 32 bits (the original has other weights), or export the adapter alone,"
            " which programs that read packed weights add to them"
        ) from None
    merged.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=merged) as scratch:
        _write(merging, base, Path(scratch))
        for path in Path(scratch).iterdir():
            path.rename(merged / path.name)


def _write(merging: "_Merging", base: Path, merged: Path) -> None:
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
        files = [TensorFile(merged / file.path.name) for file in merging.files]
        index = {
            "metadata": {"total_size": sum(file.copied(name).num_bytes for file in files for name in file)},
            "weight_map": {name: file.path.name for file in files for name in file},
        }
        (merged / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    if merging.new_head is not None:
        config: dict[str, Any] = load_json((merged / "config.json").read_text())
        config["tie_word_embeddings"] = False
        if isinstance(text := config.get("text_config"), dict):
            text["tie_word_embeddings"] = False
        (merged / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True, eq=False)
class _Part:
    """A pair of matrices and the part of a weight that it adapts.

    expert: its place if the weight is [experts, out, in], else 0. first_row: of those that it adapts.
    """

    pair: Pair
    expert: int = 0
    first_row: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        a, b = self.pair
        return len(b), a.shape[1]

    def add(self, values: np.ndarray, start: int, scale: float) -> None:
        """Adds its part to some rows of a matrix, of which the first is `start`."""
        a, b = self.pair
        first, stop = max(start, self.first_row), min(start + len(values), self.first_row + len(b))
        if first < stop:
            values[first - start : stop - start] += scale * (b[first - self.first_row : stop - self.first_row] @ a)


class _Merging:
    """Finds the weight of each pair of matrices.

    files: of the base model. new_head: the name of the head's weight if it is added, because the base model has only
    its embedding.
    """

    def __init__(self, adapter: Path, base: Path) -> None:
        config = load_json((adapter / CONFIG).read_text())
        description = load_json((adapter / DESCRIPTION).read_text())
        if config.get("modules_to_save"):
            remedy = refusal_by_peft(description) or "load it with peft"
            raise ValueError(f"{adapter} is the adapter of a critic, whose head no base model has: {remedy}")
        self._rank = config["r"]
        self._scale = config["lora_alpha"] / self._rank
        self.files = [TensorFile(path) for path in _weight_files(base)]
        self._owners = {name: file for file in self.files for name in file}
        pairs, tied_head = pairs_of(TensorFile(adapter / WEIGHTS)), description.get("tied_head")
        self._parts: dict[str, list[_Part]] = defaultdict(list)
        self.new_head: str | None = None
        if tied_head is not None:
            self.new_head, self._embedding = f"{tied_head['head']}.weight", self._find_embedding(tied_head["embedding"])
            head = _Part(pairs.pop(tied_head["head"]))
            self._check_shape(self._embedding, head.shape)
            self._parts[self.new_head].append(head)
        self._are_transposed = (description.get("stacked_experts") or {}).get("is_transposed", False)
        for path, pair in pairs.items():
            if (match := OF_ALL_EXPERTS.fullmatch(path)) is None:
                self._place(path, pair)
            else:
                self._place_in_all(match["experts"], match["first"] is not None, pair)

    def tensors_of(self, file: TensorFile) -> dict[str, FileTensor]:
        """Returns the merged tensors that replace those of a file of the base model."""
        # A head in the files in spite of being tied has not been read by anyone.
        tensors = {name: self._merged(file, name, self._parts.get(name)) for name in file if name != self.new_head}
        if self.new_head is not None and self._embedding in file:
            tensors[self.new_head] = self._merged(file, self._embedding, self._parts[self.new_head])
        return tensors

    def _place(self, path: str, pair: Pair) -> None:
        """Adds the pair to the parts of the weight that it adapts."""
        names = _names_in_files(path)
        found, part = next((name for name in names if name in self._owners), None), _Part(pair)
        expected: tuple[int, ...] = part.shape
        if found is None and (match := OF_EXPERT.fullmatch(path)) and match["linear"] in _STACKED:
            place, rows, columns = int(match["number"]), *part.shape
            found = f"{match['experts']}.{_STACKED[match['linear']]}"
            part = _Part(pair, place, rows if match["linear"] == "up_proj" else 0)
            num_experts = self._owners[found].shape(found)[0] if found in self._owners else 0
            expected = num_experts, rows if match["linear"] == "down_proj" else 2 * rows, columns
        if found is None and (match := _OF_ATTENTION.fullmatch(path)):
            found = f"{match['layer']}.attention.query_key_value.weight"
            num_rows, rows = self._owners[found].shape(found)[0] if found in self._owners else 0, len(pair[1])
            # Keys and values have as many rows, and are the last ones.
            part = _Part(pair, first_row={"q": 0, "k": num_rows - 2 * rows, "v": num_rows - rows}[match["linear"]])
            expected = max(num_rows, 3 * rows if match["linear"] != "q" else rows), part.shape[1]
        if found not in self._owners:
            raise ValueError(f"the base model has no weight {names[0]}: name the base model of this adapter")
        self._check_shape(found, expected)
        self._parts[found].append(part)

    def _place_in_all(self, experts: str, is_first: bool, pair: Pair) -> None:
        """Adds the pair's part for each expert to the parts of the weight of all experts, or of its own."""
        name = f"{experts}.{'gate_up_proj' if is_first else 'down_proj'}"
        names = [name, *(name.replace(ours, theirs) for ours, theirs in _NAMES_OF_ALL_EXPERTS)]
        found = next((each for each in names if each in self._owners), None)
        if found is None:
            linear = "up_proj" if is_first else "down_proj"
            for number, of_one in enumerate(split_experts(pair, len(pair[0]) // self._rank)):
                self._place(f"{experts}.{number}.{linear}", of_one)
            return
        name, num_experts = found, self._owners[found].shape(found)[0]
        of_each = split_experts(pair, num_experts)
        # Where files may have either, sizes say which.
        if self._are_transposed and self._owners[name].shape(name)[1:] == _Part(of_each[0]).shape[::-1]:
            of_each = [(b.T, a.T) for a, b in of_each]
        parts = [_Part(each, number) for number, each in enumerate(of_each)]
        self._check_shape(name, (num_experts, *parts[0].shape))
        self._parts[name] += parts

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        shape = self._owners[name][name].shape
        if shape != expected:
            raise ValueError(
                f"{name} of the base model has shape {list(shape)}, and the adapter is for {list(expected)}: name the"
                " base model of this adapter"
            )

    def _find_embedding(self, path: str) -> str:
        """Returns the name of the embedding's weight, which some files have without its first part."""
        for name in (*_names_in_files(path), f"{path.partition('.')[2]}.weight"):
            if name in self._owners:
                return name
        raise ValueError(f"the base model has no weight {path}.weight: name the base model of this adapter")

    def _merged(self, file: TensorFile, name: str, parts: Sequence[_Part] | None) -> FileTensor:
        copied = file.copied(name)
        if parts is None:
            return copied
        content = partial(self._sums, file[name], copied.dtype, parts)
        return FileTensor(copied.dtype, copied.shape, copied.num_bytes, content)

    def _sums(self, values: np.ndarray, dtype: str, parts: Sequence[_Part]) -> Iterator[np.ndarray]:
        """Yields the sums of some rows after the others, rounded to the dtype of the weight."""
        by_expert: dict[int, list[_Part]] = defaultdict(list)
        for part in parts:
            by_expert[part.expert].append(part)
        for expert, matrix in enumerate(values if values.ndim == 3 else values[None]):
            for start in range(0, len(matrix), _ROWS):
                total = _to_float32(matrix[start : start + _ROWS], dtype)
                for part in by_expert[expert]:
                    part.add(total, start, self._scale)
                yield _from_float32(total, dtype)


def _names_in_files(path: str) -> list[str]:
    """Returns the names that the weight of a layer may have in files, its own first."""
    names = [path, *(path.replace(ours, theirs) for ours, theirs in _NAMES_IN_FILES)]
    for renamings in _NAMES_IN_RELEASES:
        names.append(path)
        for ours, theirs in renamings:
            names[-1] = names[-1].replace(ours, theirs)
    return [f"{name}.weight" for name in names]


def _weight_files(base: Path) -> list[Path]:
    """Returns the files of a model's weights; some directories also have them in another form."""
    if (base / _INDEX).exists():
        files = [base / name for name in sorted({*load_json((base / _INDEX).read_text())["weight_map"].values()})]
        if missing := [file.name for file in files if not file.exists()]:
            raise ValueError(
                f"{base} lacks {len(missing)} of the {len(files)} files that its {_INDEX} names, such as {missing[0]}:"
                " complete its download"
            )
        return files
    if (base / "model.safetensors").exists():
        return [base / "model.safetensors"]
    raise ValueError(f"{base} has no model.safetensors: name the directory of the base model")


def packing_of(base: Path) -> str | None:
    """Returns the quant_method that the model's config.json names, MLX if its weights are packed without one."""
    config = load_json(file.read_text()) if (file := base / "config.json").exists() else {}
    text = config.get("text_config", config.get("llm_config"))
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    given = config.get("quantization_config") or nested or config.get("quantization")
    return str(given.get("quant_method", "MLX")) if isinstance(given, dict) else None


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

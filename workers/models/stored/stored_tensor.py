"""Tensors in files, views of them, and packed ones as the numbers that they stand for.

transformers reads a model's tensors as slices of files, each rank its own part. A slice of a packed weight reads the
codes and scales of that part alone, and dequantizes them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig, modeling_utils

from ...protocol.plugins import plugin_rows
from ...shapes.packed_format import Quantization, TensorHeader
from ...shapes.packed_weights import packed_weights, unpacked_names
from ...shapes.quantization import read_quantization

# Numbers that are dequantized at a time: their float32 and those of their scales stay in a core's cache.
NUMBERS_AT_ONCE = 1 << 18

# The projections of queries, keys and values that releases of Sarvam hold in one tensor.
_FUSED = ".query_key_value."

Index = Any


class StoredTensor(Protocol):
    """A tensor in a file, as safetensors' slices and transformers know it."""

    def get_shape(self) -> Sequence[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Index) -> Tensor: ...


Tensors = Mapping[str, StoredTensor]


@contextmanager
def converting(convert: Callable[[Tensors], Tensors]) -> Iterator[None]:
    """Makes `from_pretrained` read what `convert` returns for the tensors of files by name, while inside."""
    hooked: Any = modeling_utils
    load = hooked.convert_and_load_state_dict_in_model

    def load_converted(model: Any, state_dict: Tensors, **options: Any) -> Any:
        return load(model=model, state_dict=convert(state_dict), **options)

    hooked.convert_and_load_state_dict_in_model = load_converted
    try:
        yield
    finally:
        hooked.convert_and_load_state_dict_in_model = load


class Mirrored:
    """Implements StoredTensor for a tensor whose dimensions are in the other order in the file."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored

    def get_shape(self) -> Sequence[int]:
        return self._stored.get_shape()[::-1]

    def get_dtype(self) -> str:
        return self._stored.get_dtype()

    def __getitem__(self, index: Index) -> Tensor:
        part = self._stored[(*reversed(spans(index, self.get_shape())),)]
        return part.permute(*reversed(range(part.dim())))


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name that safetensors gives the dtype of dequantized numbers."""
    return "BF16" if dtype == torch.bfloat16 else "F32"


def spans(index: Index, shape: Sequence[int]) -> list[slice]:
    """Returns a slice with ends for each dimension. An index is slices of consecutive numbers, or the ellipsis."""
    given = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
    whole = [slice(None)] * (len(shape) - len(given))
    return [slice(*each.indices(size)[:2]) for each, size in zip((*given, *whole), shape, strict=True)]


def split_projections(tensors: Mapping[str, StoredTensor], config: Any) -> dict[str, StoredTensor]:
    """Returns the tensors by name, with one of each projection for weights and biases [q | k | v].

    transformers would split them after reading, when a rank's part of the first projection has been taken from all
    three.

    Args:
        config: transformers' config of the model.
    """
    of_keys = config.num_key_value_heads * config.head_dim
    sizes = {"q_proj": config.num_attention_heads * config.head_dim, "k_proj": of_keys, "v_proj": of_keys}
    split: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        if _FUSED not in name:
            split[name] = stored
            continue
        start = 0
        for projection, size in sizes.items():
            split[name.replace(_FUSED, f".{projection}.")] = _Rows(stored, start, size)
            start += size
        if start != stored.get_shape()[0]:
            raise ValueError(f"{name} has {stored.get_shape()[0]} rows, and config.json describes {start}")
    return split


class _Rows:
    """Implements StoredTensor for consecutive rows of a stored one."""

    def __init__(self, stored: StoredTensor, start: int, size: int) -> None:
        self._stored, self._start, self._size = stored, start, size

    def get_shape(self) -> Sequence[int]:
        return [self._size, *self._stored.get_shape()[1:]]

    def get_dtype(self) -> str:
        return self._stored.get_dtype()

    def __getitem__(self, index: Index) -> Tensor:
        rows, *others = spans(index, self.get_shape())
        return self._stored[(slice(rows.start + self._start, rows.stop + self._start), *others)]


def dequantizing(config: PreTrainedConfig, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Makes `from_pretrained` with this config read packed weights as numbers of `dtype`, while inside.

    Removes the config's `quantization_config`, so that the model counts as one that never was quantized.
    """
    quantization = read_quantization(config.to_dict())
    for each in (config, config.get_text_config()):
        for key in ("quantization_config", "quantization"):
            vars(each).pop(key, None)

    def dequantize(stored: Tensors) -> Tensors:
        tensors = dequantized_tensors(stored, quantization, dtype)
        return split_projections(tensors, config) if config.model_type == "sarvam_moe" else tensors

    return converting(dequantize)


def dequantized_tensors(stored: Tensors, quantization: Quantization, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Returns the tensors of files by name, packed ones as dequantized numbers of `dtype`.

    Raises:
        ValueError: a weight is packed in a way that is not known, or its tensors do not fit together.
    """
    headers = {name: TensorHeader(each.get_dtype(), tuple(each.get_shape())) for name, each in stored.items()}
    packed = packed_weights(headers, quantization)
    dequantized: dict[str, StoredTensor] = {name: stored[name] for name in unpacked_names(headers, packed)}
    if packed:
        readers = plugin_rows("workers.formats.readers.rows", "READERS")
        dequantized |= {name: readers[type(each)](name, each, stored, dtype) for name, each in packed.items()}
    return dequantized

"""The projections of queries, keys and values that releases of Sarvam hold in one tensor.

transformers would split it after reading, when a rank's part of the first projection has been taken from all three.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .stored_tensor import Index, StoredTensor, spans

_FUSED = ".query_key_value."


def split_projections(tensors: Mapping[str, StoredTensor], config: Any) -> dict[str, StoredTensor]:
    """Returns the tensors by name, with one of each projection for weights and biases [q | k | v].

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

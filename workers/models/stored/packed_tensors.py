"""Makes transformers read the packed weights of files as the numbers that they stand for.

transformers reads a model's tensors as slices of files, each rank its own part. Here a slice of a packed weight reads
the codes and scales of that part alone, and dequantizes them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, modeling_utils

from ...protocol.plugins import plugin_rows
from ...shapes.packed_format import Quantization, TensorHeader
from ...shapes.packed_weights import packed_weights, unpacked_names
from ...shapes.quantization import read_quantization
from .fused_projections import split_projections
from .stored_tensor import StoredTensor


@contextmanager
def dequantizing(config: PreTrainedConfig, dtype: torch.dtype) -> Iterator[None]:
    """Makes `from_pretrained` with this config read packed weights as numbers of `dtype`, while inside.

    Removes the config's `quantization_config`, so that the model counts as one that never was quantized.
    """
    quantization = read_quantization(config.to_dict())
    for each in (config, config.get_text_config()):
        for key in ("quantization_config", "quantization"):
            vars(each).pop(key, None)
    hooked: Any = modeling_utils
    load = hooked.convert_and_load_state_dict_in_model

    def load_dequantized(model: Any, state_dict: Mapping[str, StoredTensor], **options: Any) -> Any:
        tensors = dequantized_tensors(state_dict, quantization, dtype)
        if config.model_type == "sarvam_moe":
            tensors = split_projections(tensors, config)
        return load(model=model, state_dict=tensors, **options)

    hooked.convert_and_load_state_dict_in_model = load_dequantized
    try:
        yield
    finally:
        hooked.convert_and_load_state_dict_in_model = load


def dequantized_tensors(
    stored: Mapping[str, StoredTensor], quantization: Quantization, dtype: torch.dtype
) -> dict[str, StoredTensor]:
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

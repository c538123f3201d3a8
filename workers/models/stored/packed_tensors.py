"""Makes transformers read the packed weights of files as the numbers that they stand for.

transformers reads a model's tensors as slices of files, each rank its own part. Here a slice of a packed weight reads
the codes and scales of that part alone, and dequantizes them.
"""

from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedConfig

from ...protocol.plugins import plugin_rows
from ...shapes.packed_format import Quantization, TensorHeader
from ...shapes.packed_weights import packed_weights, unpacked_names
from ...shapes.quantization import read_quantization
from .stored_tensor import StoredTensor, Tensors, converting, split_projections


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

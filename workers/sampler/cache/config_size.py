"""Reads from a transformers config how large the keys and values of a model are."""

from typing import Any

from transformers import PreTrainedConfig

from ...shapes.cache_size import CacheSize


def size_of_config(config: PreTrainedConfig, bytes_per_value: int, num_ranks: int = 1) -> CacheSize:
    """Returns the size of the cache of a model whose layers all have softmax attention, perhaps of different shapes.

    Args:
        config: of the model, or of one that has it as its text part.
        num_ranks: ranks that share the heads.
    """
    text = config.get_text_config()
    layers = [text.per_layer_config[layer] for layer in range(text.num_hidden_layers)]
    values = sum(map(_values_per_token, layers)) // num_ranks
    return CacheSize(values * bytes_per_value, 0, values // len(layers))


def _values_per_token(layer: Any) -> int:
    """Returns how many numbers the keys and values of a token have in one layer."""
    heads = layer.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return 2 * (getattr(layer, "num_key_value_heads", None) or heads) * head_dim

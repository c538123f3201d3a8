"""Bamba, whose layers have Mamba-2 or softmax attention: https://huggingface.co/ibm-ai-platform/Bamba-9B-v2."""

from collections.abc import Mapping, Sequence

from ..parts import Layer, Norms
from .config_reader import ConfigReader
from .family import Family, attention, dense, mamba

_NORMS = Norms(before_mlp="pre_ff_layernorm")


def _layers(config: ConfigReader) -> Sequence[Layer]:
    of_all = dense(config, name="feed_forward", has_bias=config.is_set("mlp_bias"))
    bias, where = config.is_set("attention_bias"), config.numbers("attn_layer_indices")
    # The field has no effect outside rope_parameters.
    softmax = attention(config.changed({"partial_rotary_factor": 0.5}), qkv_bias=bias, output_bias=bias)
    linear = mamba(config, config.number("mamba_expand") * config.hidden)
    mixers = [softmax if number in where else linear for number in range(config.num_layers)]
    return [Layer(config.hidden, mixer, of_all, _NORMS) for mixer in mixers]


_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.5,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}

BAMBA = Family("Bamba", "bamba", _layers, _DEFAULTS, last_norm="final_layernorm")

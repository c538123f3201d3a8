"""Bamba, whose layers have Mamba-2 or softmax attention: https://huggingface.co/ibm-ai-platform/Bamba-9B-v2."""

from collections.abc import Sequence

from ..parts import Layer, Norms
from .config_reader import ConfigReader
from .family import Family, attention, dense, mamba

_NORMS = Norms(before_mlp="pre_ff_layernorm")


def _layers(config: ConfigReader) -> Sequence[Layer]:
    of_all = dense(config, name="feed_forward", has_bias=config.is_set("mlp_bias"))
    where = config.numbers("attn_layer_indices")
    # The field has no effect outside rope_parameters.
    softmax = attention(config.changed({"partial_rotary_factor": 0.5}), bias_key="attention_bias")
    linear = mamba(config, config.number("mamba_expand") * config.hidden)
    mixers = [softmax if number in where else linear for number in range(config.num_layers)]
    return [Layer(config.hidden, mixer, of_all, _NORMS) for mixer in mixers]


BAMBA = Family("Bamba", "bamba", _layers, defaults={"partial_rotary_factor": 0.5}, last_norm="final_layernorm")

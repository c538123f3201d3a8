"""Granite 4, whose layers have Mamba-2 or softmax attention: https://huggingface.co/ibm-granite/granite-4.0-h-micro."""

from collections.abc import Mapping, Sequence

from ..parts import Dense, Layer
from .config_reader import ConfigReader
from .family import Family, attention, mamba


def _layers(config: ConfigReader) -> Sequence[Layer]:
    if num := config.number("num_local_experts", at_least=0):
        raise ValueError(f"Granite 4 models with experts are not supported: this one has {num}")
    linears, features = ("input_linear", "output_linear"), config.number("shared_intermediate_size")
    of_all = Dense(hidden=config.hidden, features=features, name="shared_mlp", is_fused=True, names=linears)
    bias, rotates = config.is_set("attention_bias"), config.get("position_embedding_type") == "rope"
    mixers = {
        "full_attention": attention(config, qkv_bias=bias, output_bias=bias, rotation="" if rotates else None),
        "linear_attention": mamba(config, config.number("mamba_expand") * config.hidden, module="MambaLayer"),
    }
    scale = config.fraction("residual_multiplier", 1.0)
    kinds = config.names("layer_types") or ["linear_attention"] * config.num_layers
    return [Layer(config.hidden, mixers[_LAYER_TYPES.get(kind, kind)], of_all, scales=(scale, scale)) for kind in kinds]


# Names of earlier versions of transformers.
_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}

_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}

GRANITE4 = Family("GraniteMoeHybrid", "granitemoehybrid", _layers, _DEFAULTS)

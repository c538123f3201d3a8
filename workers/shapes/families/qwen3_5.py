"""Qwen3-Next, Qwen3.5, 3.6 and 3.8, dense and sparse: https://huggingface.co/Qwen/Qwen3.5-9B.

Three layers in four run the gated delta rule, the others gated softmax attention with a partial rotation. Of the
multimodal releases the part for text runs, where the three positions of a token are equal.
"""

from collections.abc import Sequence

from ..parts import Dense, GatedDelta, Layer, Mixer, RoutedExperts
from .config_reader import ConfigReader
from .family import Family, attention, dense


def _dense_layers(config: ConfigReader) -> Sequence[Layer]:
    of_all = dense(config)
    return [Layer(config.hidden, mixer, of_all) for mixer in _mixers(config, is_fused=False)]


def _sparse_layers(config: ConfigReader) -> Sequence[Layer]:
    of_all = _experts(config)
    return [Layer(config.hidden, mixer, of_all) for mixer in _mixers(config, is_fused=False)]


def _layers_of_next(config: ConfigReader) -> Sequence[Layer]:
    of_dense, step = config.numbers("mlp_only_layers"), config.number("decoder_sparse_step")
    plain = dense(config)
    sparse = _experts(config) if config.is_set("num_experts") else plain
    is_sparse = [number not in of_dense and (number + 1) % step == 0 for number in range(config.num_layers)]
    parts = zip(_mixers(config, is_fused=True), is_sparse, strict=True)
    return [Layer(config.hidden, mixer, sparse if each else plain) for mixer, each in parts]


def _mixers(config: ConfigReader, is_fused: bool) -> Sequence[Mixer]:
    step = config.number("full_attention_interval")
    softmax = attention(config, bias_key="attention_bias", norms_heads="each", is_gated=True)
    linear = GatedDelta(
        hidden=config.hidden,
        key_heads=config.number("linear_num_key_heads"),
        value_heads=config.number("linear_num_value_heads"),
        key_dim=config.number("linear_key_head_dim"),
        value_dim=config.number("linear_value_head_dim"),
        kernel=config.number("linear_conv_kernel_dim"),
        is_fused=is_fused,
    )
    by_step = ["linear_attention" if number % step else "full_attention" for number in range(1, config.num_layers + 1)]
    kinds = {"linear_attention": linear, "full_attention": softmax}
    return [kinds[kind] for kind in config.names("layer_types") or by_step]


def _experts(config: ConfigReader) -> RoutedExperts:
    features = config.number("shared_expert_intermediate_size")
    return RoutedExperts(
        hidden=config.hidden,
        num=config.number("num_experts"),
        per_token=config.number("num_experts_per_tok"),
        features=config.number("moe_intermediate_size"),
        shared=Dense(hidden=config.hidden, features=features, name="mlp.shared_expert"),
        gates_shared=True,
    )


QWEN3_5 = Family(
    "Qwen3_5",
    "qwen3_5",
    _dense_layers,
    defaults={"partial_rotary_factor": 0.25, "full_attention_interval": 4},
    trunk="TextModel",
    rotary="TextRotaryEmbedding",
    norm_weight_plus_one=True,
)
QWEN3_5_MOE = Family(
    "Qwen3_5Moe",
    "qwen3_5_moe",
    _sparse_layers,
    defaults={"partial_rotary_factor": 0.25, "full_attention_interval": 4},
    trunk="TextModel",
    rotary="TextRotaryEmbedding",
    norm_weight_plus_one=True,
)
QWEN3_NEXT = Family(
    "Qwen3Next",
    "qwen3_next",
    _layers_of_next,
    defaults={"partial_rotary_factor": 0.25, "full_attention_interval": 4},
    norm_weight_plus_one=True,
)

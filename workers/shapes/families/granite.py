"""Granite, dense and with experts, Granite 4, whose layers have Mamba-2 or softmax attention, and HyperCLOVA X, which
has norms after each part, too. All have factors of the embedding, of scores, of the parts' outputs and of logits.
Types with "swa" have attention sinks, and windows in three layers of four.

https://huggingface.co/ibm-granite/granite-3.3-8b-instruct, https://huggingface.co/ibm-granite/granite-4.0-h-small,
https://huggingface.co/naver-hyperclovax/HyperCLOVAX-SEED-Think-14B.
"""

from collections.abc import Iterator, Sequence

from ..parts import Dense, FeedForward, Layer, Mixer, Norms, RoutedExperts
from .config_reader import ConfigReader
from .family import Family, attention, dense, mamba

_PLAIN = Norms()
_AROUND = Norms("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")


def _dense_layers(config: ConfigReader) -> Sequence[Layer]:
    mlp = dense(config, has_bias=config.is_set("mlp_bias"))
    return [_layer(config, _attention(config), mlp)] * config.num_layers


def _layers_of_hyperclovax(config: ConfigReader) -> Sequence[Layer]:
    norms = _AROUND if config.is_set("use_post_norm") else _PLAIN
    mlp = dense(config, has_bias=config.is_set("mlp_bias"))
    return [_layer(config, _attention(config), mlp, norms)] * config.num_layers


def _sparse_layers(config: ConfigReader) -> Sequence[Layer]:
    return [_layer(config, _attention(config), _experts(config, None))] * config.num_layers


def _layers_with_shared_part(config: ConfigReader) -> Sequence[Layer]:
    return [_layer(config, _attention(config), _experts_and_shared(config))] * config.num_layers


def _dense_layers_with_windows(config: ConfigReader) -> Sequence[Layer]:
    mlp = dense(config, has_bias=config.is_set("mlp_bias"))
    return [_layer(config, mixer, mlp) for mixer in _mixers_with_windows(config)]


def _sparse_layers_with_windows(config: ConfigReader) -> Sequence[Layer]:
    experts = _experts_and_shared(config)
    return [_layer(config, mixer, experts) for mixer in _mixers_with_windows(config)]


def _mixers_with_windows(config: ConfigReader) -> Iterator[Mixer]:
    by_step = ["sliding_attention" if number % 4 else "full_attention" for number in range(config.num_layers)]
    for kind, theta in zip(config.names("layer_types") or by_step, _thetas(config), strict=True):
        window = config.window if kind == "sliding_attention" else None
        yield _attention(config, theta > 0, window=window, has_sinks=True)


def _thetas(config: ConfigReader) -> Sequence[float]:
    """Returns the base of each layer's rotations, 0 if it does not rotate."""
    if config.is_set("layer_rope_theta"):
        return config.fractions("layer_rope_theta", config.num_layers)
    return (config.fraction("rope_theta", _THETA),) * config.num_layers


def _several_rotations(config: ConfigReader) -> str | None:
    others = sorted(set(_thetas(config)) - {0.0, config.fraction("rope_theta", _THETA)})
    return f"layer_rope_theta {others[0]:g}, which is not rope_theta" if others else None


def _hybrid_layers(config: ConfigReader) -> Sequence[Layer]:
    shared, has_experts = _shared(config), config.number("num_local_experts", at_least=0) > 0
    feed_forward = _experts(config, shared) if has_experts else shared
    mixers = {
        "full_attention": _attention(config, config.get("position_embedding_type") == "rope"),
        "linear_attention": mamba(config, config.number("mamba_expand") * config.hidden, module="MambaLayer"),
    }
    kinds = config.names("layer_types") or ["linear_attention"] * config.num_layers
    return [_layer(config, mixers[_LAYER_TYPES.get(kind, kind)], feed_forward) for kind in kinds]


def _layer(config: ConfigReader, mixer: Mixer, feed_forward: FeedForward, norms: Norms = _PLAIN) -> Layer:
    scale = config.fraction("residual_multiplier", 1.0)
    return Layer(config.hidden, mixer, feed_forward, norms, scales=(scale, scale))


def _attention(config: ConfigReader, rotates: bool = True, **settings: int | None) -> Mixer:
    return attention(config, bias_key="attention_bias", rotation="" if rotates else None, **settings)


def _experts_and_shared(config: ConfigReader) -> RoutedExperts:
    return _experts(config, _shared(config) if config.is_set("shared_intermediate_size") else None)


def _experts(config: ConfigReader, shared: Dense | None) -> RoutedExperts:
    return RoutedExperts(
        hidden=config.hidden,
        num=config.number("num_local_experts"),
        per_token=config.number("num_experts_per_tok"),
        features=config.number("intermediate_size"),
        are_stacked=True,
        router="router",
        shared=shared,
        name="block_sparse_moe",
        module="MoE",
    )


def _shared(config: ConfigReader) -> Dense:
    linears, features = ("input_linear", "output_linear"), config.number("shared_intermediate_size")
    return Dense(hidden=config.hidden, features=features, name="shared_mlp", is_fused=True, names=linears)


# Names of earlier versions of transformers.
_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}

_THETA = 10000.0
_EMBEDDING_SCALE, _LOGITS = "embedding_multiplier", "logits_scaling"

GRANITE = Family("Granite", "granite", _dense_layers, embedding_scale_key=_EMBEDDING_SCALE, logit_divisor_key=_LOGITS)
HYPERCLOVAX = Family(
    "HyperCLOVAX", "hyperclovax", _layers_of_hyperclovax, embedding_scale_key=_EMBEDDING_SCALE, logit_scale_key=_LOGITS
)
GRANITE_MOE = Family(
    "GraniteMoe", "granitemoe", _sparse_layers, embedding_scale_key=_EMBEDDING_SCALE, logit_divisor_key=_LOGITS
)
GRANITE_MOE_SHARED = Family(
    "GraniteMoeShared",
    "granitemoeshared",
    _layers_with_shared_part,
    embedding_scale_key=_EMBEDDING_SCALE,
    logit_divisor_key=_LOGITS,
)
GRANITE_SWA = Family(
    "GraniteSWA",
    "granite_swa",
    _dense_layers_with_windows,
    unsupported=_several_rotations,
    embedding_scale_key=_EMBEDDING_SCALE,
    logit_divisor_key=_LOGITS,
)
GRANITE_MOE_SWA = Family(
    "GraniteMoeSWA",
    "granitemoe_swa",
    _sparse_layers_with_windows,
    unsupported=_several_rotations,
    embedding_scale_key=_EMBEDDING_SCALE,
    logit_divisor_key=_LOGITS,
)
GRANITE4 = Family(
    "GraniteMoeHybrid",
    "granitemoehybrid",
    _hybrid_layers,
    aliases={"layers_block_type": "layer_types"},
    embedding_scale_key=_EMBEDDING_SCALE,
    logit_divisor_key=_LOGITS,
)

"""Gemma 4: https://huggingface.co/google/gemma-4-E4B-it.

Layers without a window have heads of another size; values have norms, and in some models are the keys before their
norms. The last layers of small models use the keys and values of earlier ones, and each layer has an input of its own
for each token in addition to the residual stream. In sparse models routed experts run next to the dense part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..parts import Dense, ExpertNorms, Layer, Norms, RoutedExperts, SoftmaxAttention, Weight
from .config_reader import ConfigReader
from .family import Family, attention, kinds_by_step

_NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_SPARSE_NORMS = replace(_NORMS, before_mlp=None)
_EXPERT_NORMS = ExpertNorms(
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
_ACTIVATION = "gelu_pytorch_tanh"


def _layers(config: ConfigReader) -> Sequence[Layer]:
    kinds, num_own = _kinds(config), _num_own(config)
    sources = {kind: number for number, kind in enumerate(kinds[:num_own])} if num_own < config.num_layers else {}
    size = config.number("hidden_size_per_layer_input", 0, at_least=0) or None
    is_sparse, layers = config.is_set("enable_moe_block"), []
    for number, kind in enumerate(kinds):
        mixer = _mixer(config, number, kind, sources[kind] if number >= num_own else None)
        dense = _dense(config, mixer.kv_source is not None)
        parts = (_experts(config, dense), _SPARSE_NORMS) if is_sparse else (dense, _NORMS)
        layers.append(Layer(config.hidden, mixer, *parts, token_input=size, is_scaled=True))
    return layers


def _kinds(config: ConfigReader) -> Sequence[str]:
    return [*(config.names("layer_types") or kinds_by_step(config, 6))[:-1], "full_attention"]


def _num_own(config: ConfigReader) -> int:
    """Returns how many layers have keys and values of their own, the first ones."""
    return config.num_layers - config.number("num_kv_shared_layers", at_least=0)


def _unsupported(config: ConfigReader) -> str | None:
    kinds, num_own = _kinds(config), _num_own(config)
    if num_own < 1:
        return f"{config.num_layers - num_own} layers that share keys and values of {max(num_own, 0)} others"
    lacking = sorted({*kinds[num_own:]} - {*kinds[:num_own]})
    if lacking:
        return f"layers of {lacking[0]} that share keys and values of no other layer"
    of_layers, vocab = config.number("vocab_size_per_layer_input"), config.number("vocab_size")
    has_inputs = config.number("hidden_size_per_layer_input", 0, at_least=0) > 0
    return (
        f"vocab_size {vocab} and vocab_size_per_layer_input {of_layers}" if has_inputs and of_layers < vocab else None
    )


def _other_weights(config: ConfigReader) -> Mapping[str, tuple[int, ...]]:
    """Returns those that compute the layers' inputs for each token."""
    size = config.number("hidden_size_per_layer_input", 0, at_least=0)
    if not size:
        return {}
    of_layers = config.num_layers * size
    return {
        "embed_tokens_per_layer.weight": (config.number("vocab_size_per_layer_input"), of_layers),
        "per_layer_model_projection.weight": (of_layers, config.hidden),
        "per_layer_projection_norm.weight": (size,),
    }


def _mixer(config: ConfigReader, number: int, kind: str, source: int | None) -> SoftmaxAttention:
    has_bias, has_window = config.is_set("attention_bias"), kind == "sliding_attention"
    is_of_release = config.get("per_layer_config") is None
    of_layer = _of_kind(config, has_window) if is_of_release else config.of_layer(number)
    return attention(
        of_layer,
        rotary_dim=of_layer.head_dim,
        rotation=kind,
        window=config.window if has_window else None,
        qkv_bias=has_bias,
        output_bias=has_bias,
        norms_heads="each",
        projects_values=has_window or not config.is_set("attention_k_eq_v"),
        norms_values=True,
        kv_source=source,
        module="TextAttention",
    )


def _of_kind(config: ConfigReader, has_window: bool) -> ConfigReader:
    """Returns the config of layers with or without a window, as releases write it."""
    if has_window:
        return config
    kv_heads = config.get("num_global_key_value_heads") if config.is_set("attention_k_eq_v") else None
    own = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return config.changed(own | {"head_dim": config.number("global_head_dim")})


def _dense(config: ConfigReader, shares_keys: bool) -> Dense:
    is_wide = shares_keys and config.is_set("use_double_wide_mlp")
    features = config.number("intermediate_size") * (2 if is_wide else 1)
    return Dense(hidden=config.hidden, features=features, activation=_ACTIVATION, module="TextMLP")


def _experts(config: ConfigReader, dense: Dense) -> RoutedExperts:
    num = config.number("num_experts")
    return RoutedExperts(
        hidden=config.hidden,
        num=num,
        per_token=config.number("top_k_experts", at_most=num),
        features=config.number("moe_intermediate_size"),
        are_stacked=True,
        router="router",
        router_weight="proj.weight",
        router_biases=(Weight("router.scale", (config.hidden,)), Weight("router.per_expert_scale", (num,))),
        shared=dense,
        norms=_EXPERT_NORMS,
        name="",
        module="TextDecoderLayer",
    )


GEMMA4 = Family(
    "Gemma4",
    "gemma4",
    _layers,
    defaults={"global_head_dim": 512},
    unsupported=_unsupported,
    trunk="TextModel",
    rotary="TextRotaryEmbedding",
    embedding="TextScaledWordEmbedding",
    layer="TextDecoderLayer",
    activation=_ACTIVATION,
    activation_key="hidden_activation",
    logit_cap_key="final_logit_softcapping",
    other_weights=_other_weights,
)

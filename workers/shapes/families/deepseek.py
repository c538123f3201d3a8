"""DeepSeek-V3 and models of its shape: latent attention, routed and shared experts. Kimi-K2, GLM-4.7-Flash,
Sarvam 105B, and Mistral Small 4, whose queries grow with their positions.

DeepSeek-V3.2 and GLM-5 choose the tokens of attention by an indexer. https://arxiv.org/abs/2412.19437,
https://arxiv.org/abs/2512.02556.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..parts import Dense, FeedForward, Indexer, LatentAttention, Layer, RoutedExperts
from .config_reader import ConfigReader
from .family import Family, dense, query_growth


def _layers(config: ConfigReader) -> Sequence[Layer]:
    mixer = _attention(config)
    return [Layer(config.hidden, mixer, each) for each in feed_forwards(config, experts_of(config))]


def _layers_of_mistral4(config: ConfigReader) -> Sequence[Layer]:
    mixer, experts = replace(_attention(config), growth=query_growth(config)), experts_of(config)
    parts = feed_forwards(config, replace(experts, are_stacked=True))
    return [Layer(config.hidden, mixer, each) for each in parts]


def _layers_of_deepseek_v32(config: ConfigReader) -> Sequence[Layer]:
    return _indexed_layers(config, is_interleaved=False, share=[False] * config.num_layers)


def _layers_of_glm_moe_dsa(config: ConfigReader) -> Sequence[Layer]:
    share = [kind in _SHARED for kind in _kinds_of_indexers(config)]
    return _indexed_layers(config, is_interleaved=True, share=share)


def _kinds_of_indexers(config: ConfigReader) -> Sequence[str]:
    """Returns the kind of each layer's indexer, as `indexer_types` or the letters of `index_topk_pattern` name it."""
    pattern = config.get("index_topk_pattern")
    named = config.names("indexer_types") or (list(pattern) if isinstance(pattern, str | list | tuple) else ())
    if named:
        return [str(kind) for kind in named]
    step, first = config.number("index_topk_freq", 1), config.number("index_skip_topk_offset", 2, at_least=0)
    counted = [max(number - first + 1, 0) for number in range(config.num_layers)]
    return ["shared" if number % step else "full" for number in counted]


def _indexed_layers(config: ConfigReader, is_interleaved: bool, share: Sequence[bool]) -> Sequence[Layer]:
    """Returns layers with indexers.

    Args:
        is_interleaved: whether the rotated pairs of the indexers' features are neighbours.
        share: whether each layer takes what the last indexer has chosen.
    """
    plain, heads, most = _attention(config), config.number("index_n_heads"), config.number("index_topk")
    head_dim = config.number("index_head_dim", at_least=plain.rotary_dim)
    indexers = [Indexer(heads, head_dim, most, is_interleaved, each) for each in share]
    mixers = [replace(plain, indexer=each, is_interleaved=True) for each in indexers]
    parts = zip(mixers, feed_forwards(config, experts_of(config)), strict=True)
    return [Layer(config.hidden, *each) for each in parts]


def feed_forwards(
    config: ConfigReader, experts: RoutedExperts, num_dense: int = 1, **settings: bool
) -> Sequence[FeedForward]:
    """Returns the feed-forward part of each layer.

    Args:
        num_dense: how many of the first layers are dense where no field says it.
        settings: fields of the dense parts.
    """
    kinds, of_dense = config.names("mlp_layer_types"), dense(config, **settings)
    num_dense = config.number("first_k_dense_replace", num_dense, at_least=0)
    is_sparse = [kind == "sparse" for kind in kinds] if kinds else [i >= num_dense for i in range(config.num_layers)]
    return [experts if each else of_dense for each in is_sparse]


def _attention(config: ConfigReader) -> LatentAttention:
    return LatentAttention(
        hidden=config.hidden,
        heads=config.heads,
        query_rank=config.number("q_lora_rank") if config.get("q_lora_rank") is not None else None,
        kv_rank=config.number("kv_lora_rank"),
        plain_dim=config.number("qk_nope_head_dim"),
        rotary_dim=config.number("qk_rope_head_dim"),
        value_dim=config.number("v_head_dim"),
        is_interleaved=config.is_set("rope_interleave"),
        bias=config.is_set("attention_bias"),
    )


def experts_of(config: ConfigReader) -> RoutedExperts:
    """Returns experts of the sizes that configs of this shape name alike."""
    features = config.number("moe_intermediate_size")
    shared = features * config.number("n_shared_experts")
    return RoutedExperts(
        hidden=config.hidden,
        num=config.number("n_routed_experts"),
        per_token=config.number("num_experts_per_tok"),
        features=features,
        shared=Dense(hidden=config.hidden, features=shared, name="mlp.shared_experts"),
        module="MoE",
    )


def _unsupported(config: ConfigReader) -> str | None:
    heads, of_keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    return None if of_keys in (None, heads) else f"{of_keys} num_key_value_heads and {heads} num_attention_heads"


def _unsupported_of_glm_moe_dsa(config: ConfigReader) -> str | None:
    is_first_shared = config.names("indexer_types") and _kinds_of_indexers(config)[0] in _SHARED
    return "a first layer without an indexer of its own" if is_first_shared else _unsupported(config)


_SHARED = ("shared", "S")

# A config without num_key_value_heads has as many as heads: transformers' default is that of its largest model.
_DEFAULTS: Mapping[str, object] = {"num_key_value_heads": None, "partial_rotary_factor": None}
_INDEXED: Mapping[str, object] = {**_DEFAULTS, "rope_interleave": True}

# Another name of a field, also in models with the experts of DeepSeek-V3.
ALIASES = {"num_local_experts": "n_routed_experts"}
# Those of Sarvam's releases.
SARVAM_ALIASES = {**ALIASES, "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}

DEEPSEEK_V3 = Family(
    "DeepseekV3",
    "deepseek_v3",
    _layers,
    defaults=_DEFAULTS,
    aliases=ALIASES,
    unsupported=_unsupported,
    settings=("kv_lora_rank",),
)
GLM4_MOE_LITE = Family(
    "Glm4MoeLite",
    "glm4_moe_lite",
    _layers,
    defaults=_DEFAULTS,
    aliases={**ALIASES, "head_dim": "qk_rope_head_dim"},
    unsupported=_unsupported,
    settings=("kv_lora_rank",),
)
_INDEXED_ALIASES = {**ALIASES, "num_experts": "n_routed_experts"}
DEEPSEEK_V32 = Family(
    "DeepseekV32",
    "deepseek_v32",
    _layers_of_deepseek_v32,
    defaults=_INDEXED,
    aliases=_INDEXED_ALIASES,
    unsupported=_unsupported,
    settings=("kv_lora_rank",),
)
GLM_MOE_DSA = Family(
    "GlmMoeDsa",
    "glm_moe_dsa",
    _layers_of_glm_moe_dsa,
    defaults=_INDEXED,
    aliases=_INDEXED_ALIASES,
    unsupported=_unsupported_of_glm_moe_dsa,
    settings=("kv_lora_rank",),
)
SARVAM_MLA = Family(
    "DeepseekV3",
    "deepseek_v3",
    _layers,
    defaults=_DEFAULTS,
    aliases=SARVAM_ALIASES,
    unsupported=_unsupported,
    settings=("kv_lora_rank",),
)
MISTRAL4 = Family(
    "Mistral4",
    "mistral4",
    _layers_of_mistral4,
    defaults={
        **_DEFAULTS,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "llama_4_scaling_beta": 0.1,
        },
    },
    aliases=ALIASES,
    unsupported=_unsupported,
    settings=("kv_lora_rank",),
)

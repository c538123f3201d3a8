"""The differences between the model families that run with our own layers (workers/models/fused_decoder.py).

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Norms:
    """Names of a layer's norms by position, before and after attention and the feed-forward part. None = no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        every = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in every if name is not None)


@dataclass(frozen=True)
class Family:
    """Models of one `model_type`, with Llama's arithmetic unless fields say otherwise.

    name: the prefix of its classes in transformers. module: the module of transformers that defines them.
    trunk, embedding: suffixes of the classes of the model without its head and of its embedding; None = torch's
    embedding.
    defaults: values of fields that a config.json may leave out.

    norms_heads: whether queries and keys have a norm, over each head or over all heads together.
    norm_weight_plus_one: whether 1 is added to the weights of norms.
    biases: config settings that add biases to all projections of attention, or to those of the feed-forward part.
    qkv_bias: whether the projections to queries, keys and values always have a bias, independent of the config.
    has_fused_projections: whether one projection computes queries, keys and values, and another one gate and up.
    windows: which layers use the config's sliding window: every layer, or those that its `layer_types`,
    `max_window_layers` or `sliding_window_pattern` name.
    has_local_rope: whether layers with and without a window have different rotations.
    activation, activation_key: the activation of gates, and the config's field for it.
    sparsity: which layers have experts.
    sparse_block, expert_linears: names in checkpoint files of the block with experts, and of an expert's gate, up and
    down.
    """

    name: str
    module: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    trunk: str = "Model"
    embedding: str | None = None
    norms: Norms = Norms()
    norms_heads: Literal["each", "together"] | None = None
    norm_weight_plus_one: bool = False
    biases: tuple[str, ...] = ()
    qkv_bias: bool = False
    has_fused_projections: bool = False
    windows: Literal["every", "by_layer"] | None = None
    has_local_rope: bool = False
    activation: str = "silu"
    activation_key: str = "hidden_act"
    sparsity: Literal["some", "all"] | None = None
    sparse_block: str = "mlp"
    expert_linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


_OF_ALL: Mapping[str, object] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": None,
    "num_key_value_heads": None,
    "sliding_window": None,
    "use_sliding_window": True,
}

_OF_QWEN: Mapping[str, object] = {
    **_OF_ALL,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
}

# Windows start at some layer, or are used in the layers that `layer_types` lists.
_BY_LAYER: Mapping[str, object] = {"max_window_layers": 28, "layer_types": None}

_ATTENTION = ("attention_bias",)

# By model_type.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "Llama", "llama", {**_OF_ALL, "max_position_embeddings": 2048}, biases=("attention_bias", "mlp_bias")
    ),
    "mistral": Family(
        "Mistral",
        "mistral",
        {**_OF_ALL, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        windows="every",
    ),
    "mixtral": Family(
        "Mixtral",
        "mixtral",
        {
            **_OF_ALL,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        windows="every",
        sparsity="all",
        sparse_block="block_sparse_moe",
        expert_linears=("w1", "w3", "w2"),
    ),
    "phi3": Family(
        "Phi3", "phi3", {**_OF_ALL, "max_position_embeddings": 4096}, has_fused_projections=True, windows="every"
    ),
    "qwen2": Family("Qwen2", "qwen2", {**_OF_QWEN, **_BY_LAYER}, qkv_bias=True, windows="by_layer"),
    "qwen3": Family(
        "Qwen3",
        "qwen3",
        {**_OF_QWEN, **_BY_LAYER, "head_dim": 128},
        norms_heads="each",
        biases=_ATTENTION,
        windows="by_layer",
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        "qwen3_moe",
        {
            **_OF_QWEN,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        norms_heads="each",
        biases=_ATTENTION,
        windows="every",
        sparsity="some",
    ),
    "olmo2": Family(
        "Olmo2",
        "olmo2",
        {**_OF_ALL, "max_position_embeddings": 2048},
        norms=Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        norms_heads="together",
        biases=_ATTENTION,
    ),
    "gemma3_text": Family(
        "Gemma3",
        "gemma3",
        {
            **_OF_ALL,
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "layer_types": None,
            "tie_word_embeddings": True,
        },
        trunk="TextModel",
        embedding="TextScaledWordEmbedding",
        norms=Norms(
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        ),
        norms_heads="each",
        norm_weight_plus_one=True,
        biases=_ATTENTION,
        windows="by_layer",
        has_local_rope=True,
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
    ),
}

# Rotations that do not depend on the lengths in a batch.
FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})

# Further model_types. They run with transformers' modules and give the same numbers packed, alone and sampled.
# tests/workers/models/test_survey.py checks each of them, and all others of transformers.
# fmt: off
BY_TRANSFORMERS = frozenset({
    "afmoe", "apertus", "arcee", "aria_text", "bitnet", "cohere", "cohere2", "cohere2_moe",
    "cohere_compass_text", "cwm", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "flex_olmo", "gemma", "glm", "glm4", "glm4_moe", "gpt-sw3", "gpt2", "gpt_bigcode",
    "gpt_neox", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "mellum",
    "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "olmo", "olmo3", "olmoe", "opt",
    "persimmon", "phimoe", "qwen2_moe", "seed_oss", "smollm3", "solar_open", "starcoder2",
})
# fmt: on

# Multimodal models of which only the part for text runs: model_type of the whole -> model_type of that part.
TEXT_PARTS: Mapping[str, str] = {"gemma3": "gemma3_text"}

# Settings under which logits are not `hidden @ unembedding.T`, or attention is not plain causal attention.
REFUSED_SETTINGS = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "kv_lora_rank",
    "use_bidirectional_attention",
)

# Those of the above that change nothing if they are 1.
_SCALES = frozenset({"logit_scale", "logits_scaling"})

# For model_types that run with transformers' modules: the setting by which their logits are multiplied, or divided.
LOGIT_SCALES: Mapping[str, str] = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "cohere_compass_text": "logit_scale",
    "hyperclovax": "logits_scaling",
}
LOGIT_DIVISORS: Mapping[str, str] = {
    "granite": "logits_scaling",
    "granitemoe": "logits_scaling",
    "granitemoeshared": "logits_scaling",
}

# Other kinds of layers carry a state along the row, from one packed sequence into the next.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def unsupported_setting(model_type: str, config: Mapping[str, object]) -> str | None:
    """Returns the first setting whose arithmetic is not implemented for this model_type, None if there is no such
    setting."""
    known = LOGIT_SCALES.get(model_type), LOGIT_DIVISORS.get(model_type)
    for setting in REFUSED_SETTINGS:
        value = config.get(setting)
        if value and setting not in known and not (setting in _SCALES and value == 1):
            return setting
    return None


def logit_scale_of(config: Any) -> float:
    """Returns the factor by which a model with this config of transformers multiplies its logits."""
    multiplier = getattr(config, LOGIT_SCALES.get(config.model_type, ""), None)
    divisor = getattr(config, LOGIT_DIVISORS.get(config.model_type, ""), None)
    return (1.0 if multiplier is None else float(multiplier)) / (1.0 if divisor is None else float(divisor))

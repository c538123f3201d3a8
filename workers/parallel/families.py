"""The families of models that run by our own layers (workers/trunk.py), under every layout. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """Models of one `model_type`.

    name: what the classes of transformers begin with. defaults: what a config.json may leave out.
    norms_heads: whether each head of queries and keys goes through a norm. query_bias: whether the projections to
    queries, keys and values have a bias whatever the config says.
    """

    name: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    norms_heads: bool = False
    query_bias: bool = False


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

# Windows from some layer on, or in those that `layer_types` names.
_BY_LAYER: Mapping[str, object] = {"max_window_layers": 28, "layer_types": None}

# By model_type, which is also the module of transformers that holds the classes.
FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama", {**_OF_ALL, "max_position_embeddings": 2048}),
    "mistral": Family(
        "Mistral",
        {**_OF_ALL, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family("Qwen2", {**_OF_QWEN, **_BY_LAYER}, query_bias=True),
    "qwen3": Family("Qwen3", {**_OF_QWEN, **_BY_LAYER, "head_dim": 128}, norms_heads=True),
    "qwen3_moe": Family(
        "Qwen3Moe",
        {
            **_OF_QWEN,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        norms_heads=True,
    ),
}

# Rotations that do not depend on the lengths in a batch.
FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})

# Settings under which logits are not `hidden @ unembedding.T`, or attention is not plain causal attention.
OTHER_ARITHMETIC = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "kv_lora_rank",
)

# Layers of other kinds carry a state along the row, from one packed sequence into the next.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

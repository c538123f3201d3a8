"""A tiny config for each type of causal language model in transformers, for the survey of them."""

import dataclasses
from copy import deepcopy
from typing import Any

from trainhouse.workers.shapes.families import FAMILIES
from trainhouse.workers.shapes.other_models import BY_TRANSFORMERS
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from ...tiny import INDEXER_SHAPE, YARN_ROPE

# Types of FAMILIES that the installed transformers has.
OWN = [each for each in FAMILIES if each in CONFIG_MAPPING]
SERVED = sorted({*OWN, *BY_TRANSFORMERS})

# Settings that make a config small, if it has them.
_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "n_embd": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "dff": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "sliding_window": 5,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "initializer_range": 0.1,
    "init_std": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SPARSE_BEHIND = {"mlp_layer_types": ["dense", "sparse"]}

_SCALARS = {
    "logits_scaling": 4.0,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}

# Settings that a type needs, or that include all its kinds of layers.
_OF_TYPE: dict[str, dict[str, Any]] = {
    # Every head of latent attention has keys of its own.
    "deepseek_v3": {"num_key_value_heads": 4},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "sarvam_mla": {"num_key_value_heads": 4, "q_lora_rank": None},
    "deepseek_v32": {"num_key_value_heads": 4, "head_dim": 8} | INDEXER_SHAPE,
    "glm_moe_dsa": {"num_key_value_heads": 4, "head_dim": 8, "indexer_types": ["full", "shared"]} | INDEXER_SHAPE,
    "afmoe": _WINDOWS,
    "cohere2": _WINDOWS,
    "cohere_compass_text": _WINDOWS
    | {"rope_parameters": dict.fromkeys(_WINDOWS["layer_types"], _ROPE), "logit_scale": 0.3},
    "cohere2_moe": _WINDOWS | _SPARSE_BEHIND,
    "llama4_text": {"num_experts_per_tok": 1, "no_rope_layers": [1, 0], "moe_layers": [0], "intermediate_size_mlp": 64}
    | {"attention_chunk_size": 5, "floor_scale": 4},
    # Matrices of experts are not square: tinker-cookbook takes their directions from their sizes.
    "mistral4": {"num_key_value_heads": 4, "rope_parameters": YARN_ROPE | {"llama_4_scaling_beta": 0.3}}
    | {"moe_intermediate_size": 24},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "exaone4": _WINDOWS,
    "exaone_moe": _WINDOWS | _SPARSE_BEHIND,
    "gemma2": {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0},
    "gemma3_text": _WINDOWS,
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "use_double_wide_mlp": True,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "granite": _SCALARS,
    "granitemoe": _SCALARS,
    "granitemoeshared": _SCALARS,
    "hyperclovax": _SCALARS | {"logits_scaling": 0.5},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": _SCALARS | {"layer_types": ["linear_attention", "full_attention"]},
    "kolibri1": _WINDOWS,
    "laguna": _WINDOWS | _SPARSE_BEHIND | {"num_attention_heads_per_layer": [4, 2]},
    "mellum": _WINDOWS,
    "ministral": _WINDOWS,
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "moe", "full_attention"], "moe_latent_size": 24},
    "olmo3": _WINDOWS,
    "qwen2": _WINDOWS | {"use_sliding_window": True},
    "qwen2_moe": _WINDOWS | {"use_sliding_window": True},
    "qwen3": _WINDOWS | {"use_sliding_window": True},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _HYBRID),
    "phimoe": {"sliding_window": 5, "lm_head_bias": True, "attention_bias": True, "router_jitter_noise": 0.4},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 5, "block_types": ["recurrent", "attention"]},
    "smollm3": {"no_rope_layers": [0, 1]},
    "solar_open": {"first_k_dense_replace": 0},
    "zaya": {"num_experts_per_tok": 1},
}


# Settings without which transformers makes no model of a type's defaults.
NEEDED_SETTINGS: dict[str, dict[str, Any]] = {
    each: {"head_dim": 64} for each in ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe")
} | {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
}


def default_config(model_type: str) -> dict[str, Any]:
    """Returns the default config.json of a type, the smallest possible one if it has no defaults."""
    try:
        return AutoConfig.for_model(model_type, **NEEDED_SETTINGS.get(model_type, {})).to_dict()
    except Exception:  # of any kind, by type
        return {"model_type": model_type}


def tiny_config_of(model_type: str, **settings: object) -> PreTrainedConfig:
    """Returns the config of a model with two layers or a few more, and with all features of its type.

    Raises what the type's config raises if such a small one is not possible.
    """
    return AutoConfig.for_model(model_type, **(tiny_settings_of(model_type) | settings))


def tiny_settings_of(model_type: str) -> dict[str, Any]:
    """Returns the settings of such a model that are not the type's defaults."""
    kind = type(AutoConfig.for_model(model_type))
    names = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    given = {name: value for name, value in _SMALL.items() if name in names} | _OF_TYPE.get(model_type, {})
    if "layers_block_type" in given:
        given.pop("num_hidden_layers", None)
    return deepcopy(given)  # transformers adds to its dictionaries

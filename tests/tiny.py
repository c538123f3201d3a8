"""Tiny random models of each supported family, generated on demand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from trainhouse.workers.shapes.model_shape import ModelShape, describe_model
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    CohereCompassTextConfig,
    DeepseekV3Config,
    DeepseekV32Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

# transformers lists it under images only.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

KINDS = ("llama", "qwen2", "qwen3", "qwen3_tied", "qwen3_moe")

# Used by some tests only: a dense layer before the sparse one.
MORE_KINDS = ("qwen3_moe_mixed",)
# Those with layers that carry a state from token to token.
RECURRENT_KINDS = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "granite4", "granite4_moe", "falcon_h1", "bamba"),
    *("nemotron_h", "nemotron_h_moe", "nemotron_h_latent"),
)
# Other families.
FAMILY_KINDS = (
    "mistral",
    "mixtral",
    "phi3",
    "olmo2",
    "gemma2",
    "gemma3",
    *RECURRENT_KINDS,
    "deepseek_v3",
    "glm4_moe_lite",
    "llama4",
    "mistral4",
    "deepseek_v32",
    "glm_moe_dsa",
    "gpt_oss",
)
# Run by transformers' modules.
OTHER_KINDS = ("cohere_compass",)

TINY_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # Wide enough that a random model's predictions differ from token to token.
    "initializer_range": 0.1,
}

# One layer with the gated delta rule, and one with gated attention whose heads rotate by half.
HYBRID_SHAPE: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

# A dense layer and a sparse one, both with latent attention.
LATENT_SHAPE: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
}

# Chooses few tokens, so that sequences of all tests are longer. Many heads: tokens at which the products of all are
# negative have equal scores, and of these transformers takes any.
INDEXER_SHAPE: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 4}

# Mamba-2 with two groups of heads.
MAMBA_SHAPE: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
}

# The multipliers of Falcon-H1, all different.
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 5.7,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.9, 0.7],
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.6, 0.7, 0.8, 1.2, 1.3],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.9,
}

# Two layers with a window, and two without one, which have larger heads.
GEMMA4_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "sliding_window": 5,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 512,
    "final_logit_softcapping": 3.0,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# Short, so that positions of a test pass it.
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 3,
}

# Of Phi-MoE's releases: all positions of a test are below the original length.
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0 + 0.2 * number for number in range(8)],
    "long_factor": [4.0] * 8,
    "short_mscale": 1.2,
    "long_mscale": 1.3,
}

# Of Hunyuan's releases: "dynamic", but the same for all lengths.
ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}

WINDOWS: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK_EXPERTS: dict[str, Any] = {
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
}
GRANITE_SHAPE: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}

# What configs have in addition to TINY_SHAPE, by kind: the model_type, or another name, with the model_type among the
# settings. Tests of all families read from its declaration what they ask of a kind.
PLAIN: Mapping[str, Mapping[str, Any]] = {
    "arcee": {"mlp_bias": True},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.3},
    "afmoe": WINDOWS
    | EXPERTS
    | {"moe_intermediate_size": 32, "num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 1.5}
    | {"mup_enabled": True},
    "cohere2": WINDOWS | {"logit_scale": 0.3},
    "cwm": WINDOWS | {"rope_parameters": LLAMA3_ROPE},
    "dots1": WINDOWS | DEEPSEEK_EXPERTS | {"head_dim": 16},
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone": {},
    "exaone4": WINDOWS,
    "exaone_moe": WINDOWS | EXPERTS | {"moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse"]},
    "flex_olmo": EXPERTS | {"intermediate_size": 32},
    "gemma": {},
    "gemma4": {"model_type": "gemma4_text"} | GEMMA4_SHAPE | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "gemma4_large": {"model_type": "gemma4_text"}
    | GEMMA4_SHAPE
    | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 4},
    "gemma4_moe": {"model_type": "gemma4_text"}
    | GEMMA4_SHAPE
    | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 4}
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "glm": {},
    "glm4": {},
    "glm4_moe": DEEPSEEK_EXPERTS | {"use_qk_norm": True, "attention_bias": True},
    "granite": GRANITE_SHAPE,
    "granitemoe": GRANITE_SHAPE | {"intermediate_size": 32},
    "granite_swa": GRANITE_SHAPE | WINDOWS | {"layer_rope_theta": [10000.0, 0]},
    "granitemoe_swa": GRANITE_SHAPE | WINDOWS | {"intermediate_size": 32, "shared_intermediate_size": 48},
    "granitemoeshared": GRANITE_SHAPE | {"intermediate_size": 32, "shared_intermediate_size": 48},
    "helium": {},
    "hunyuan_v1_dense": {"attention_bias": True, "rope_parameters": ALPHA_ROPE},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": EXPERTS | {"moe_intermediate_size": 32, "router_scaling_factor": 1.5},
    "hyperclovax": {"embedding_multiplier": 12.0, "logits_scaling": 0.3, "residual_multiplier": 0.22}
    | {"attention_multiplier": 0.1},
    "jais2": {},
    "kolibri1": WINDOWS | EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 40},
    "laguna": WINDOWS
    | EXPERTS
    | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "moe_routed_scaling_factor": 1.5}
    | {"num_attention_heads_per_layer": [4, 8]},
    "mellum": WINDOWS | EXPERTS | {"moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse"]},
    "ministral3": {"sliding_window": 5, "rope_parameters": YARN_ROPE | {"llama_4_scaling_beta": 0.3}},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "ministral": WINDOWS,
    "nemotron": {"attention_bias": True, "mlp_bias": True},
    "olmo3": WINDOWS | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "olmoe": EXPERTS,
    "phimoe": {"num_local_experts": 4, "intermediate_size": 32, "sliding_window": 5, "rope_parameters": LONG_ROPE}
    # Wide enough that both experts of a token have a weight below 1.
    | {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.4},
    "qwen2_moe": EXPERTS
    | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}
    | {"use_sliding_window": True, "sliding_window": 5},
    "sarvam_moe": DEEPSEEK_EXPERTS,
    "sarvam_mla": LATENT_SHAPE | {"q_lora_rank": None, "num_key_value_heads": 4},
    "seed_oss": {"mlp_bias": True, "attention_out_bias": True},
    "solar_open": DEEPSEEK_EXPERTS,
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "starcoder2": {"sliding_window": 5},
    "smollm3": {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 5},
}
# Without types that only later releases of transformers have.
PLAIN_KINDS = tuple(kind for kind, given in PLAIN.items() if given.get("model_type", kind) in CONFIG_MAPPING)


def tiny_config(kind: str, **overrides: object) -> PreTrainedConfig:
    shape = TINY_SHAPE | overrides
    qwen3_shape = {"head_dim": 16} | shape
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    hybrid_shape = HYBRID_SHAPE | shape
    latent_shape = LATENT_SHAPE | shape | {"num_key_value_heads": shape["num_attention_heads"]}
    match kind:
        case "llama":
            return LlamaConfig(**shape)
        case "qwen2":
            return Qwen2Config(**shape)
        case "qwen3":
            return Qwen3Config(**qwen3_shape)
        case "qwen3_tied":
            return Qwen3Config(**(qwen3_shape | {"tie_word_embeddings": True}))
        case "qwen3_moe":
            return Qwen3MoeConfig(**(experts | qwen3_shape))
        case "qwen3_moe_mixed":
            return Qwen3MoeConfig(**(experts | {"mlp_only_layers": [0]} | qwen3_shape))
        case "mistral":
            return MistralConfig(**({"sliding_window": 5} | shape))
        case "mixtral":
            return MixtralConfig(**({"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5} | shape))
        case "phi3":
            return Phi3Config(**({"sliding_window": 7} | shape))
        case "olmo2":
            return Olmo2Config(**shape)
        case "gemma3":
            kinds = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
            return Gemma3TextConfig(**(kinds | {"query_pre_attn_scalar": 24} | qwen3_shape))
        case "gemma3_capped":
            return tiny_config("gemma3", **({"final_logit_softcapping": 0.3} | overrides))
        case "qwen3_5":
            return Qwen3_5TextConfig(**hybrid_shape)
        case "qwen3_5_moe":
            return Qwen3_5MoeTextConfig(**(experts | {"shared_expert_intermediate_size": 48} | hybrid_shape))
        case "qwen3_next":
            return Qwen3NextConfig(**(experts | {"shared_expert_intermediate_size": 48} | hybrid_shape))
        case "gemma2":
            caps = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}
            settings = {"sliding_window": 5, "query_pre_attn_scalar": 24}
            return Gemma2Config(**(caps | settings | qwen3_shape))
        case "gpt_oss":
            rope = {"rope_type": "default", "rope_theta": 10000.0}
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
            expert_options = {**experts, "rope_parameters": rope}
            return GptOssConfig(**(expert_options | qwen3_shape))
        case "deepseek_v3":
            return DeepseekV3Config(**({"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1} | latent_shape))
        case "glm4_moe_lite":
            return Glm4MoeLiteConfig(**latent_shape)
        case "deepseek_v32":
            groups = {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
            return DeepseekV32Config(**(groups | INDEXER_SHAPE | latent_shape))
        case "glm_moe_dsa":
            kinds = {"first_k_dense_replace": 1, "indexer_types": ["full", "shared"]}
            return GlmMoeDsaConfig(**(kinds | INDEXER_SHAPE | latent_shape))
        case "llama4":
            # The first layer is sparse and rotates in parts of three tokens, the second is dense and does not rotate.
            kinds = {"moe_layers": [0], "no_rope_layers": [1, 0], "attention_chunk_size": 3, "floor_scale": 4}
            sizes = {"intermediate_size": 32, "intermediate_size_mlp": 128, "num_local_experts": 4}
            return Llama4TextConfig(**(kinds | qwen3_shape | sizes | overrides))
        case "mistral4":
            rope = YARN_ROPE | {"llama_4_scaling_beta": 0.3, "mscale_all_dim": 1.0}
            settings = {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "rope_parameters": rope}
            return Mistral4Config(**(settings | latent_shape))
        case "granite4":
            kinds = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0}
            scalars = {"embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22}
            sizes = {"shared_intermediate_size": 96, "attention_multiplier": 0.1}
            return GraniteMoeHybridConfig(**(kinds | scalars | sizes | MAMBA_SHAPE | shape))
        case "granite4_moe":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
            return tiny_config("granite4", **(experts | overrides))
        case "falcon_h1":
            norm = {"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
            return FalconH1Config(**(norm | MULTIPLIERS | MAMBA_SHAPE | shape))
        case "granite4_one_group" | "granite4_moe_one_group":
            one_group = {"mamba_n_groups": 1, "mamba_proj_bias": True}
            return tiny_config(kind.removesuffix("_one_group"), **(one_group | overrides))
        case "falcon_h1_one_group":
            return tiny_config("falcon_h1", **({"mamba_n_groups": 1} | overrides))
        case "granite4_biases":
            return tiny_config("granite4", **({"mamba_proj_bias": True} | overrides))
        case "bamba":
            return BambaConfig(**({"attn_layer_indices": [1]} | MAMBA_SHAPE | shape))
        case "nemotron_h":
            kinds = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "head_dim": 16}
            sizes = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8}
            known = {name: value for name, value in shape.items() if name != "num_hidden_layers"}
            return NemotronHConfig(**(kinds | sizes | known))
        case "nemotron_h_moe" | "nemotron_h_latent":
            kinds = {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
            sizes = {"n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48}
            groups = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5}
            latent = {"moe_latent_size": 40 if kind == "nemotron_h_latent" else None}
            return tiny_config("nemotron_h", **(kinds | sizes | groups | latent | overrides))
        case "cohere_compass":
            kinds = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
            kinds["rope_parameters"] = {"sliding_attention": DEFAULT_ROPE, "full_attention": DEFAULT_ROPE}
            return CohereCompassTextConfig(**(kinds | {"logit_scale": 0.3} | shape))
        case _ if kind in PLAIN:
            return AutoConfig.for_model(**({"model_type": kind, "head_dim": 16} | TINY_SHAPE | PLAIN[kind] | overrides))
        case _:
            kinds = (*KINDS, *MORE_KINDS, *FAMILY_KINDS, *PLAIN_KINDS, *OTHER_KINDS)
            raise ValueError(f"unknown kind {kind!r}: one of {kinds}")


def declared(kind: str, **overrides: object) -> ModelShape:
    """Returns what the kind's family declares."""
    shape = describe_model(kind, tiny_config(kind, **overrides).to_dict())
    assert isinstance(shape, ModelShape), shape.refusal
    return shape


def tiny_model(kind: str, directory: Path, seed: int = 0, **overrides: object) -> Path:
    """Saves a random model (hidden 64, 2 layers, vocabulary 512 unless overridden); returns `directory`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **overrides), dtype=torch.float32)
    for parameter in model.parameters():
        # Transformers leaves AFMoE's routers zero: all tokens would take the same experts.
        if parameter.ndim == 2 and not parameter.any():
            parameter.data.normal_(std=0.1)
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        # Transformers makes them ones: whether they are applied would not matter.
        if name.endswith(("router.scale", "per_expert_scale", "layer_scalar")):
            each.data.uniform_(0.6, 1.4)
        elif name.endswith("sinks") and not each.any():  # and these zero
            each.data.normal_()
    if kind.startswith("gemma4"):
        scale_queries(model)
    model.save_pretrained(directory)
    return directory


def scale_queries(model: Any) -> None:
    """Gives queries' norms the scale of scores, as Gemma 4 has it. Without it rounding would grow by layer."""
    for name, each in model.named_parameters():
        if name.endswith("q_norm.weight"):
            each.data.fill_(each.numel() ** -0.5)

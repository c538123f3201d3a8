"""Configs of models that the hosted service serves, and of others that people train, as far as they differ from the
defaults of their types.
"""

from collections.abc import Mapping
from typing import Any

LONG = {"max_position_embeddings": 262144}
YARN_OF_DEEPSEEK = {"rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}}


def hybrid(hidden: int, layers: int, heads: int, value_heads: int, **others: object) -> dict[str, Any]:
    """Returns the config of a Qwen3.5 model; a sparse one if `others` has no intermediate_size."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    model_type = "qwen3_5" if "intermediate_size" in others else "qwen3_5_moe"
    text = {"model_type": f"{model_type}_text", **LONG, **sizes, "linear_num_value_heads": value_heads, **others}
    return {"model_type": model_type, "text_config": text}


def granite4(hidden: int, heads: int, kv_heads: int, **others: object) -> dict[str, Any]:
    """Returns the config of a Granite 4 model whose every tenth layer has attention, and the others Mamba-2."""
    return {
        "model_type": "granitemoehybrid",
        "hidden_size": hidden,
        "num_hidden_layers": 40,
        "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "mamba_d_state": 128,
        "vocab_size": 100352,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        **others,
    }


LINEUP: Mapping[str, Mapping[str, Any]] = {
    "Qwen3.5-4B": hybrid(2560, 32, 16, 32, intermediate_size=9216, tie_word_embeddings=True),
    "Qwen3.5-9B": hybrid(4096, 32, 16, 32, intermediate_size=12288),
    "Qwen3.8-27B": hybrid(5120, 64, 24, 48, intermediate_size=17408),
    "Qwen3.6-35B-A3B": hybrid(2048, 40, 16, 32),
    "Qwen3.5-397B-A17B": hybrid(
        4096, 60, 32, 64, num_experts=512, moe_intermediate_size=1024, shared_expert_intermediate_size=1024
    ),
    "Qwen3-8B": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {"model_type": "gpt_oss"},
    "DeepSeek-V3.1": {"model_type": "deepseek_v3", "max_position_embeddings": 163840, **YARN_OF_DEEPSEEK},
    "DeepSeek-V3.2": {"model_type": "deepseek_v32", **YARN_OF_DEEPSEEK},
    "GLM-5": {"model_type": "glm_moe_dsa"},
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
    },
    "Kimi-K2.6": {
        "model_type": "kimi_k25",
        "text_config": {
            "model_type": "deepseek_v3",
            **LONG,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "first_k_dense_replace": 1,
            "vocab_size": 163840,
        },
    },
    "Nemotron-3-Nano-30B-A3B": {
        "model_type": "nemotron_h",
        **LONG,
        "hidden_size": 2688,
        "hybrid_override_pattern": "M" * 23 + "E" * 23 + "*" * 6,
        "num_key_value_heads": 2,
        "mamba_num_heads": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    },
    "Nemotron-3-Super-120B-A12B": {
        "model_type": "nemotron_h",
        **LONG,
        "hybrid_override_pattern": "M" * 40 + "E" * 40 + "*" * 8,
        "num_key_value_heads": 2,
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_latent_size": 1024,
        "moe_intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
    },
    # Its publishers name the latent size, 22 of 512 experts, and 550 billion parameters, 55 of them active. The sizes
    # of experts give these numbers; the layers, the published count of adapters on attention and Mamba-2.
    "Nemotron-3-Ultra-550B-A55B": {
        "model_type": "nemotron_h",
        **LONG,
        "hidden_size": 8192,
        "hybrid_override_pattern": "M" * 48 + "E" * 48 + "*" * 12,
        "num_attention_heads": 64,
        "num_key_value_heads": 2,
        "mamba_num_heads": 256,
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_latent_size": 2048,
        "moe_intermediate_size": 5120,
        "moe_shared_expert_intermediate_size": 10240,
    },
    "Granite-3.3-8B": {
        "model_type": "granite",
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "intermediate_size": 12800,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 49159,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "Granite-4.0-H-Tiny": granite4(
        1536, 12, 4, mamba_n_heads=48, shared_intermediate_size=1024, intermediate_size=512, num_local_experts=64
    )
    | {"num_experts_per_tok": 6},
    "Granite-4.0-H-Small": granite4(
        4096, 32, 8, mamba_n_heads=128, shared_intermediate_size=1536, intermediate_size=768, num_local_experts=72
    )
    | {"num_experts_per_tok": 10},
    "gemma-4-26B-A4B": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            **LONG,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
    },
}

# Models of types that are refused, by name.
REFUSED_LINEUP = {"Inkling": "inkling_mm_model", "Kimi-Linear-48B-A3B": "kimi_linear", "Qwen4": "qwen4_exp"}

_QWEN3_SIZES = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
_LLAMA3_SIZES = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True}
_OF_30B = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
_OF_30B |= {"intermediate_size": 6144, "moe_intermediate_size": 768}
_OF_235B = {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64}
_OF_235B |= {"intermediate_size": 12288, "moe_intermediate_size": 1536}


def _sparse_qwen3(sizes: Mapping[str, object], kv_heads: int) -> dict[str, Any]:
    text = {**_QWEN3_SIZES, **sizes, "num_key_value_heads": kv_heads, "num_experts": 128, "num_experts_per_tok": 8}
    return {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {}}


# Others of which the hosted service publishes how large adapters are.
COUNTED: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-4B": {
        "model_type": "qwen3",
        **_QWEN3_SIZES,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
    },
    "Qwen3-32B": {
        "model_type": "qwen3",
        **_QWEN3_SIZES,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25600,
    },
    "Llama-3.2-1B": {
        **_LLAMA3_SIZES,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "intermediate_size": 8192,
    },
    "Llama-3.2-3B": {
        **_LLAMA3_SIZES,
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "intermediate_size": 8192,
    },
    "Qwen3-VL-30B-A3B": _sparse_qwen3(_OF_30B, 4),
    "Qwen3-VL-235B-A22B": _sparse_qwen3(_OF_235B, 4),
}

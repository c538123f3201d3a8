"""Models that run with transformers' modules, and settings that no model may have.

Imports no torch.
"""

from collections.abc import Mapping
from typing import Any

# Further model_types. They run with transformers' modules and give the same numbers packed, alone and sampled.
# tests/workers/models/test_survey.py checks each of them, and all others of transformers.
# fmt: off
BY_TRANSFORMERS = frozenset({
    "apertus", "aria_text", "bitnet", "cohere2_moe", "cohere_compass_text", "gpt-sw3", "gpt2", "gpt_bigcode",
    "gpt_neox", "jetmoe", "minimax_m3_vl_text", "olmo", "opt", "persimmon",
})
# fmt: on

# Multimodal models of which only the part for text runs: model_type of the whole -> model_type of that part.
TEXT_PARTS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}

# What our layers lack for types of which models are trained, by the start of the model_type.
_MISSING: Mapping[str, str] = {
    "deepseek_v4": "compressed attention, nor hyper-connections",
    "glm5_next": "Kimi delta attention, nor hyper-connections",
    "inkling": "relative-position bias, nor short convolution of keys and values",
    "kimi_linear": "Kimi delta attention",
    "nemotron_h_omni": "part for images",
    "qwen4_exp": "attention by an indexer, nor gated residual stream",
}

# Those whose part for text is a causal model with its own head.
WITH_HEAD = frozenset({"llama4"})

# Those whose part for text has the type that its config names, if it names one.
_OF_ANY_TEXT = frozenset({"mistral3"})

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

# A setting that changes nothing for text.
_OF_IMAGES = "use_bidirectional_attention", "vision"

# The setting by which the logits of a model_type are multiplied, or divided.
LOGIT_SCALES: Mapping[str, str] = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "cohere_compass_text": "logit_scale",
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
}
LOGIT_DIVISORS: Mapping[str, str] = {
    "granite": "logits_scaling",
    "granitemoe": "logits_scaling",
    "granitemoehybrid": "logits_scaling",
    "granitemoeshared": "logits_scaling",
}

# The setting with the largest absolute value that a model's logits approach.
LOGIT_CAPS: Mapping[str, str] = dict.fromkeys(("gemma2", "gemma3_text", "gemma4_text"), "final_logit_softcapping")

# Other kinds of layers carry a state along the row, from one packed sequence into the next.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def missing_part(model_type: str) -> str | None:
    """Returns what our layers lack for this type, None if nothing is known to be missing."""
    return next((parts for start, parts in _MISSING.items() if model_type.startswith(start)), None)


def text_type_of(config: Mapping[str, object]) -> str:
    """Returns the model_type of the part for text; that of the whole if there are no other parts."""
    whole, nested = str(config.get("model_type", "unknown")), config.get("text_config")
    named = nested.get("model_type") if whole in _OF_ANY_TEXT and isinstance(nested, dict) else None
    return str(named or TEXT_PARTS.get(whole, whole))


def unsupported_setting(model_type: str, config: Mapping[str, object], implemented: tuple[str, ...] = ()) -> str | None:
    """Returns the first setting whose arithmetic is not implemented for this model_type, None if there is no such
    setting. `implemented`: by the family's own layers."""
    known = [*(settings.get(model_type) for settings in (LOGIT_SCALES, LOGIT_DIVISORS, LOGIT_CAPS)), *implemented]
    for setting in REFUSED_SETTINGS:
        value = config.get(setting)
        if (setting in _SCALES and value == 1) or (setting, value) == _OF_IMAGES:
            continue
        if value and setting not in known:
            return setting
    return None


def logit_scale_of(config: Any) -> float:
    """Returns the factor by which a model with this config of transformers multiplies its logits."""
    multiplier = getattr(config, LOGIT_SCALES.get(config.model_type, ""), None)
    divisor = getattr(config, LOGIT_DIVISORS.get(config.model_type, ""), None)
    return (1.0 if multiplier is None else float(multiplier)) / (1.0 if divisor is None else float(divisor))


def logit_cap_of(config: Any) -> float | None:
    """Returns the cap in cap * tanh(logits / cap) of a model with this config of transformers, None if it has none."""
    return getattr(config, LOGIT_CAPS.get(config.model_type, ""), None)

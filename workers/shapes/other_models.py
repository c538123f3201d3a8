"""Models that run with transformers' modules, and settings that no model may have.

Imports no torch.
"""

from collections.abc import Mapping
from typing import Any

from .families import FAMILIES
from .families.defaults import TEXT_PARTS as TEXT_PART_DEFAULTS

# Further model_types. They run with transformers' modules and give the same numbers packed, alone and sampled.
# tests/workers/models/test_survey.py checks each of them, and all others of transformers.
# fmt: off
BY_TRANSFORMERS = frozenset({
    "apertus", "aria_text", "bitnet", "cohere2_moe", "cohere_compass_text", "gpt-sw3", "gpt2", "gpt_bigcode",
    "gpt_neox", "jetmoe", "minimax_m3_vl_text", "olmo", "opt", "persimmon",
})
# fmt: on

# Multimodal models of which only the part for text runs: model_type of the whole -> type of causal models that compute
# the same as that part does for text, whose positions are the same in every axis.
TEXT_PARTS: Mapping[str, str] = {
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "glm46v": "glm4",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "glmga": "glm4",
    "got_ocr2": "qwen2",
    "hyperclovax_vision_v2": "hyperclovax",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "nemotron_h_omni": "nemotron_h",
    "ovis2": "qwen2",
    "qianfan_ocr": "qwen3",
    "qwen2_5_vl": "qwen2",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "smolvlm": "llama",
    "video_llama_3": "qwen2",
    "vipllava": "llama",
    "voxtral": "llama",
}

# Types of releases that transformers knows under another name -> that name.
SAME_TYPES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}

# Why types that someone might train are refused, by the start of the model_type.
_SCALED_APART = (
    "transformers runs the whole without the {} of its part for text, so that the two have different log-probabilities"
)
_REFUSED: Mapping[str, str] = {
    "aya_vision": _SCALED_APART.format("logit_scale"),
    "cohere2_vision": _SCALED_APART.format("logit_scale"),
    "deepseek_v4": "trainhouse has no compressed attention, nor hyper-connections",
    "glm5_next": "trainhouse has no Kimi delta attention, nor hyper-connections",
    "granite_speech": _SCALED_APART.format("logits_scaling"),
    "inkling": "trainhouse has no relative-position bias, nor short convolution of keys and values",
    "jamba": "trainhouse has no Mamba-1 layers",
    "kimi_linear": "trainhouse has no Kimi delta attention",
    "qwen4_exp": "trainhouse has no sparse attention of Qwen4, nor gated residual streams",
    "zamba": "trainhouse has no attention that several layers share",
}

# Those whose part for text is a causal model with its own head.
WITH_HEAD = frozenset({"llama4", "nemotron_h_omni"})

# Those whose part for text has the type that its config names, if it names one.
# fmt: off
_OF_ANY_TEXT = frozenset({
    "got_ocr2", "idefics2", "idefics3", "internvl", "lighton_ocr", "llava", "llava_next", "llava_next_video",
    "llava_onevision", "mistral3", "ovis2", "qianfan_ocr", "qwen2_audio", "smolvlm", "video_llama_3", "vipllava",
    "voxtral",
})
# fmt: on

# Those that call their part for text text_model; others call it language_model.
TEXT_MODELS = frozenset({"idefics2", "idefics3", "smolvlm"})

# Those whose files have the matrices of a layer's experts in one tensor of [experts, in, out].
TRANSPOSED_EXPERTS = frozenset({"qwen3_vl_moe"})

# Defaults of the part for text in place of those of its type, in addition to what transformers' config classes declare.
_TEXT_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    whole: {"head_dim": None, "partial_rotary_factor": 1.0} for whole in ("glm46v", "glm4v", "glmga")
}

# Settings that the part for text has without saying so.
_TEXT_SETTINGS: Mapping[str, Mapping[str, object]] = {
    **{whole: {"attention_bias": True} for whole in ("glm46v", "glm4v", "glmga")},
    # It has neither experts nor inputs of layers for each token.
    "gemma4_unified": {"hidden_size_per_layer_input": 0, "enable_moe_block": False},
    "glm4v_moe": {"use_qk_norm": False},
    "qwen3_vl_moe": {"norm_topk_prob": True},
}

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

# The setting by which the logits of a type that runs with transformers' modules are multiplied.
_LOGIT_SCALES: Mapping[str, str] = dict.fromkeys(("cohere2_moe", "cohere_compass_text"), "logit_scale")

# Other kinds of layers carry a state along the row, from one packed sequence into the next.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def refusal_of_type(model_type: str) -> str | None:
    """Returns why models of this type, served as they are or as a part for text, are refused; None if they are not."""
    reason = next((why for start, why in _REFUSED.items() if model_type.startswith(start)), None)
    if reason is None and model_type not in (*FAMILIES, *BY_TRANSFORMERS):
        reason = "it was not verified that sequences get the same numbers in a shared pass as alone"
    if reason is None:
        return None
    return f"{model_type} models are not supported: {reason}; docs/models.md lists the models that are served"


def text_type_of(config: Mapping[str, object]) -> str:
    """Returns transformers' model_type of the part for text; that of the whole if there are no other parts."""
    whole, nested = str(config.get("model_type", "unknown")), config.get("text_config")
    named = nested.get("model_type") if whole in _OF_ANY_TEXT and isinstance(nested, dict) else None
    return str(named or TEXT_PARTS.get(whole) or SAME_TYPES.get(whole, whole))


def text_part_of(whole: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the config of the part for text inside a model's config.json, empty if there is none."""
    nested = whole.get("text_config", whole.get("llm_config"))
    return nested if isinstance(nested, dict) else {}


def left_out_of(model_type: str) -> str | None:
    """Returns a sentence about what is not loaded of models of this type, None if all of it is loaded."""
    if model_type not in TEXT_PARTS:
        return None
    return f"of {model_type} models only the part for text is loaded: requests with images or sound are refused"


def text_settings(whole: Mapping[str, object]) -> Mapping[str, object]:
    """Returns settings of the part for text that are not in its config: those that a model's config.json does not
    name, and whether the head is tied, where the head is the whole's."""
    model_type, key = str(whole.get("model_type")), "tie_word_embeddings"
    has_head = model_type in TEXT_PARTS and model_type not in WITH_HEAD
    tied = {key: whole[key]} if has_head and key in whole else {}
    return {**_TEXT_SETTINGS.get(model_type, {}), **tied}


def text_defaults(whole: Mapping[str, object]) -> Mapping[str, object]:
    """Returns values of fields that the text part of a model's config.json may leave out, where the family's differ."""
    model_type = str(whole.get("model_type"))
    return {**TEXT_PART_DEFAULTS.get(model_type, {}), **_TEXT_DEFAULTS.get(model_type, {})}


def unsupported_setting(model_type: str, config: Mapping[str, object]) -> str | None:
    """Returns the first setting whose arithmetic is not implemented for this model_type, None if there is no such
    setting."""
    family = FAMILIES.get(model_type)
    known = {_LOGIT_SCALES.get(model_type)} if family is None else family.implemented
    for setting in REFUSED_SETTINGS:
        value = config.get(setting)
        if (setting in _SCALES and value == 1) or (setting, value) == _OF_IMAGES:
            continue
        if value and setting not in known:
            return setting
    return None


def logit_scale_of(config: Any) -> float:
    """Returns the factor by which a model with this config of transformers multiplies its logits."""
    family = FAMILIES.get(config.model_type)
    keys = ("", _LOGIT_SCALES.get(config.model_type, ""))
    of_divisor, of_scale = keys if family is None else (family.logit_divisor_key, family.logit_scale_key)
    multiplier, divisor = getattr(config, of_scale, None), getattr(config, of_divisor, None)
    return (1.0 if multiplier is None else float(multiplier)) / (1.0 if divisor is None else float(divisor))


def logit_cap_of(config: Any) -> float | None:
    """Returns the cap in cap * tanh(logits / cap) of a model with this config of transformers, None if it has none."""
    family = FAMILIES.get(config.model_type)
    return getattr(config, family.logit_cap_key, None) if family is not None else None

"""Tiny random models that also take images."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, AutoModelForMultimodalLM

from ..tiny import scale_queries, tiny_config

_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_QWEN |= {"patch_size": 4, "num_position_embeddings": 16}
_PIXTRAL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_GEMMA4 = _PIXTRAL | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
_PIXTRAL |= {"head_dim": 16, "patch_size": 4, "image_size": 16}
_LLAMA4 = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_LLAMA4 |= {"image_size": 16, "patch_size": 4, "vision_output_dim": 32, "projector_input_dim": 32}
_LLAMA4 |= {"projector_output_dim": 32, "pixel_shuffle_ratio": 0.5}
_SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIGLIP |= {"patch_size": 4, "image_size": 16}
_RADIO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 16}
_RADIO |= {"model_type": "radio", "video_temporal_patch_size": 2}

# By kind of the part for text (see tiny.py): type of the whole, and config of the part for images.
CONTAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("mistral", "ministral3", "mistral4"), ("mistral3", _PIXTRAL)),
    **dict.fromkeys(("gemma4", "gemma4_large", "gemma4_moe"), ("gemma4", _GEMMA4)),
    "gemma3": ("gemma3", _SIGLIP),
    "llama4": ("llama4", _LLAMA4),
    "nemotron_h_moe": ("nemotron_h_omni", _RADIO),
    "qwen3_5": ("qwen3_5", _QWEN),
    "qwen3_5_moe": ("qwen3_5_moe", _QWEN),
}


# By type of others: kind of the part for text.
TEXT_KINDS = {
    "exaone4_5": "exaone4",
    "gemma4_unified": "gemma4_large",
    **dict.fromkeys(("glm46v", "glm4v", "glmga"), "glm4"),
    "glm4v_moe": "glm4_moe",
    "hyperclovax_vision_v2": "hyperclovax",
    **dict.fromkeys(("idefics2", "llava_next"), "mistral"),
    **dict.fromkeys(("idefics3", "llava", "llava_next_video", "smolvlm", "vipllava", "voxtral"), "llama"),
    **dict.fromkeys(("got_ocr2", "llava_onevision", "ovis2", "qwen2_5_vl", "qwen2_audio", "qwen2_vl"), "qwen2"),
    "video_llama_3": "qwen2",
    **dict.fromkeys(("internvl", "lighton_ocr", "qianfan_ocr", "qwen3_vl"), "qwen3"),
    "qwen3_vl_moe": "qwen3_moe",
}
# Refused ones, and the setting of the part for text that transformers' class of the whole leaves out.
SCALED_APART = {
    "aya_vision": ("cohere2", "logit_scale"),
    "cohere2_vision": ("cohere2", "logit_scale"),
    "granite_speech": ("granite", "logits_scaling"),
    "granite_speech_plus": ("granite", "logits_scaling"),
}
_OTHER_PARTS = ("vision_config", "audio_config", "encoder_config", "projector_config")
# Settings of parts for images and sound, of which each has some.
_SMALL = dict.fromkeys(("hidden_size", "embed_dim", "d_model"), 32) | {"out_hidden_size": 64}
_SMALL |= dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 48) | {"patch_size": 4, "image_size": 16}
_SMALL |= dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers"), 1)
_SMALL |= dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "num_key_value_heads"), 2)
# Features of a head that rotate by each axis.
_AXES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), (2, 3, 3)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), (3, 3, 2)),
}
_AXES |= dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glmga"), (1, 1, 2))


def tiny_whole(model_type: str, directory: Path, **overrides: object) -> Any:
    """Saves a random model of one of TEXT_KINDS or SCALED_APART; returns the model.

    Args:
        overrides: settings of the part for text.
    """
    defaults: Any = CONFIG_MAPPING[model_type]()
    others = {name: config.to_dict() for name in _OTHER_PARTS if (config := getattr(defaults, name, None)) is not None}
    for other, of_other in others.items():
        small = {key: value for key, value in _SMALL.items() if key in of_other}
        others[other] = small | {"model_type": of_other["model_type"]}
    if model_type == "internvl":
        others["vision_config"] |= {"image_size": [16, 16], "patch_size": [4, 4]}
    text = tiny_config(TEXT_KINDS.get(model_type) or SCALED_APART[model_type][0], **overrides).to_dict()
    if model_type in _AXES or model_type == "gemma4_unified":
        text["model_type"] = defaults.get_text_config().model_type
    if model_type in _AXES:
        text["rope_parameters"].setdefault("mrope_section", list(_AXES[model_type]))
    config: Any = CONFIG_MAPPING[model_type](**{"text_config": text, **others})
    torch.manual_seed(0)
    whole: Any = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    if model_type == "gemma4_unified":
        scale_queries(whole)
    whole.save_pretrained(directory)
    return whole


def tiny_container(kind: str, directory: Path, of_whole: dict[str, Any] | None = None, **overrides: object) -> Any:
    """Saves a random model whose part for text is of this kind; returns the model.

    Args:
        of_whole: further settings of the whole. overrides: settings of the part for text.
    """
    model_type, vision = CONTAINERS[kind]
    text = tiny_config(kind, **overrides).to_dict()
    settings: dict[str, Any] = {"text_config": text, "vision_config": vision}
    if model_type == "nemotron_h_omni":
        settings |= {"audio_config": None, "vision_hidden_size": 32, "projector_hidden_size": 32}
    if model_type == "gemma4":
        text["use_bidirectional_attention"] = "vision"
        settings |= {f"{name}_token_id": 500 + number for number, name in enumerate(("image", "video", "audio"))}
    config = AutoConfig.for_model(model_type, **(settings | (of_whole or {})))
    torch.manual_seed(0)
    whole: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for name, buffer in whole.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    whole.save_pretrained(directory)
    return whole


def kimi_container(text: Path, directory: Path) -> Path:
    """Puts a saved DeepSeek-V3 into the container of Kimi-K2.5's releases; returns `directory`."""
    weights = {f"language_model.{name}": each for name, each in load_file(text / "model.safetensors").items()}
    images = {"vision_tower.patch_embed.pos_emb.weight": torch.zeros(4, 4)}
    directory.mkdir()
    save_file(weights | images, directory / "model.safetensors", metadata={"format": "pt"})
    of_text = json.loads((text / "config.json").read_text()) | {"model_type": "kimi_k2"}
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": of_text}
    (directory / "config.json").write_text(json.dumps(whole))
    return directory

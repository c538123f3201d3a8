"""Tiny random models that also take images."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from ..tiny import tiny_config

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

# By kind of the part for text (see tiny.py): type of the whole, and config of the part for images.
CONTAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("mistral", "ministral3", "mistral4"), ("mistral3", _PIXTRAL)),
    **dict.fromkeys(("gemma4", "gemma4_large", "gemma4_moe"), ("gemma4", _GEMMA4)),
    "gemma3": ("gemma3", _SIGLIP),
    "llama4": ("llama4", _LLAMA4),
    "qwen3_5": ("qwen3_5", _QWEN),
    "qwen3_5_moe": ("qwen3_5_moe", _QWEN),
}


def tiny_container(kind: str, directory: Path, of_whole: dict[str, Any] | None = None, **overrides: object) -> Any:
    """Saves a random model whose part for text is of this kind; returns the model.

    Args:
        of_whole: further settings of the whole. overrides: settings of the part for text.
    """
    model_type, vision = CONTAINERS[kind]
    text = tiny_config(kind, **overrides).to_dict()
    settings: dict[str, Any] = {"text_config": text, "vision_config": vision}
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

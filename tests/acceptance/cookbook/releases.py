"""Tiny models under the names of releases, with tokenizers whose special tokens are those of the models' renderers."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from ...hub_cache import add_to_hub_cache
from ...live import save_byte_tokenizer
from ...tiny import tiny_model

BASE, QWEN, QWEN_9B = "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B"
GPT_OSS, KIMI = "openai/gpt-oss-20b", "moonshotai/Kimi-K2.6"
UNLISTED = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""A model that the cookbook does not know."""
KINDS = {
    **dict.fromkeys((BASE, QWEN, QWEN_9B), "qwen3_5"),
    GPT_OSS: "gpt_oss",
    KIMI: "deepseek_v3",
    UNLISTED: "llama",
}
OF_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
OF_HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
OF_KIMI = ["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<think>", "</think>"]
SPECIALS = {"qwen3_5": OF_QWEN, "gpt_oss": OF_HARMONY, "deepseek_v3": OF_KIMI, "llama": ["<|endoftext|>"]}
KIMI_COMMIT = "b5aabbfb20227ed42becbf5541dbffd213942c58"
"""The only revision of Kimi's tokenizer, a class of its own, that the cookbook loads."""
KIMI_TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class TikTokenTokenizer(PreTrainedTokenizerFast):
    pass
"""


def write_releases(folder: Path) -> dict[str, Path]:
    """Writes the models, and their tokenizers to the hub's cache in `folder`/hf; returns directories by name."""
    models = {name: release(name, folder / "models" / name) for name in KINDS}
    for name, directory in models.items():
        add_to_hub_cache(folder / "hf", name, directory, KIMI_COMMIT if name == KIMI else "0" * 40)
    return models


def release(name: str, directory: Path) -> Path:
    """Writes a tiny random model with the tokenizer and the files that the model of this name has."""
    tiny_model(KINDS[name], directory, max_position_embeddings=4096)
    save_byte_tokenizer(directory, SPECIALS[KINDS[name]])
    if name == KIMI:
        as_kimi(directory)
    return directory


def as_kimi(directory: Path) -> None:
    """Puts the text model into the container of the release, and its tokenizer into a class of its own."""
    weights = {f"language_model.{name}": each for name, each in load_file(directory / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((directory / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    (directory / "tokenization_kimi.py").write_text(KIMI_TOKENIZER)
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer |= {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))

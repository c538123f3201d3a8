"""The text part of a release that also takes images is loaded alone, and gives the numbers of the whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ...tiny import tiny_config, tiny_model
from ..adapted import Adapted

TOKENS = torch.arange(5, 17)
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}


@torch.no_grad()
def distance(adapted: Adapted, theirs: Any) -> float:
    """Returns the largest distance of log-probabilities."""
    theirs.set_attn_implementation("eager")
    return float(
        (log_softmax(adapted.logits([TOKENS], None)) - log_softmax(theirs(TOKENS[None]).logits[0])).abs().max()
    )


def assert_adapts_modules_of(adapted: Adapted, whole: Any) -> None:
    """Asserts that adapters have the names of the whole model, which has the text part below another one."""
    modules, targets = {name for name, _ in whole.named_modules()}, adapted.create("a").targets
    for target in targets:
        parent = target.name.rpartition(".")[0]
        whole_name = f"{parent}.{target.part_of}" if target.part_of is not None else target.name
        assert (parent if target.num_experts is not None else whole_name) in modules, target.name
    assert any("language_model" in target.name for target in targets)


def log_softmax(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("kind", ["mistral", "ministral3", "mistral4"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_mistral_with_images_runs_as_the_whole_does(kind: str, is_tied: bool, tmp_path: Path) -> None:
    """Ties the head where only the config of the whole says so."""
    text = tiny_config(kind).to_dict() | {"tie_word_embeddings": False}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"head_dim": 16, "patch_size": 4, "image_size": 16}
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=vision, tie_word_embeddings=is_tied)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(tmp_path)
    adapted = Adapted(tmp_path)
    assert adapted.base.runs_own_layers
    assert (adapted.base.head_name == adapted.base.embedding_name) == is_tied
    assert distance(adapted, whole) < 1e-5
    with torch.no_grad():
        whole.get_input_embeddings().weight.mul_(1.01)
    assert distance(adapted, whole) > 1e-5


def test_llama4_with_images_runs_as_the_whole_does(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4, "vision_output_dim": 32, "projector_input_dim": 32}
    vision |= {"projector_output_dim": 32, "pixel_shuffle_ratio": 0.5}
    config = AutoConfig.for_model("llama4", text_config=tiny_config("llama4").to_dict(), vision_config=vision)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(tmp_path)
    adapted = Adapted(tmp_path)
    assert adapted.base.runs_own_layers
    assert distance(adapted, whole) < 1e-5
    names = {name for name, _ in whole.named_parameters()}
    ours = {adapted.base.saved_name(name) for name, _ in adapted.base.model.named_parameters()}
    assert ours <= names
    assert not [name for name in names - ours if name.startswith("language_model.")]
    assert_adapts_modules_of(adapted, whole)
    with torch.no_grad():
        whole.get_input_embeddings().weight.mul_(1.01)
    assert distance(adapted, whole) > 1e-5


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_qwen_with_images_runs_as_the_whole_does(kind: str, tmp_path: Path) -> None:
    vision = VISION | {"patch_size": 4, "num_position_embeddings": 16}
    config = AutoConfig.for_model(kind, text_config=tiny_config(kind).to_dict(), vision_config=vision)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(tmp_path)
    adapted = Adapted(tmp_path)
    assert adapted.base.runs_own_layers
    assert not [name for name, _ in adapted.base.model.named_parameters() if "visual" in name]
    assert_adapts_modules_of(adapted, whole)
    assert distance(adapted, whole) < 1e-5
    adapted.base.unembedding.mul_(1.01)
    assert distance(adapted, whole) > 1e-5


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_large", "gemma4_moe"])
def test_gemma_4_with_images_runs_as_the_whole_does(kind: str, tmp_path: Path) -> None:
    text = tiny_config(kind).to_dict() | {"use_bidirectional_attention": "vision"}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
    numbers = {f"{name}_token_id": 500 + number for number, name in enumerate(("image", "video", "audio"))}
    config = AutoConfig.for_model("gemma4", text_config=text, vision_config=vision, **numbers)
    torch.manual_seed(0)
    whole: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for name, buffer in whole.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    whole.save_pretrained(tmp_path)
    adapted = Adapted(tmp_path)
    assert adapted.base.runs_own_layers
    assert not [name for name, _ in adapted.base.model.named_parameters() if "vision" in name]
    assert distance(adapted, whole) < 1e-5
    adapted.base.unembedding.mul_(1.01)
    assert distance(adapted, whole) > 1e-5


def test_kimi_is_read_from_the_names_of_its_releases(tmp_path: Path) -> None:
    text = tiny_model("deepseek_v3", tmp_path / "text")
    weights = {f"language_model.{name}": each for name, each in load_file(text / "model.safetensors").items()}
    (release := tmp_path / "release").mkdir()
    images = {"vision_tower.patch_embed.pos_emb.weight": torch.zeros(4, 4)}
    save_file(weights | images, release / "model.safetensors", metadata={"format": "pt"})
    of_text = json.loads((text / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (release / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": of_text}))
    theirs = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
    assert distance(Adapted(release), theirs) < 1e-5

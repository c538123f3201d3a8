"""The text part of a release that also takes images is loaded alone, and gives the numbers of the whole."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainhouse.workers.models.stored.text_parts import text_config_of
from trainhouse.workers.shapes.model_shape import ModelShape, describe_model, refusal_of
from trainhouse.workers.shapes.other_models import TEXT_PARTS
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM

from ...tiny import tiny_model
from ..adapted import Adapted
from ..containers import CONTAINERS, SCALED_APART, TEXT_KINDS, kimi_container, tiny_container, tiny_whole

TOKENS = torch.arange(5, 17)


@torch.no_grad()
def distance(adapted: Adapted, theirs: Any) -> float:
    """Returns the largest distance of log-probabilities."""
    theirs.set_attn_implementation("eager")
    return float(
        (log_softmax(adapted.logits([TOKENS], None)) - log_softmax(theirs(TOKENS[None]).logits[0])).abs().max()
    )


def assert_adapts_modules_of(adapted: Adapted, whole: Any, part: str = "language_model") -> None:
    """Asserts that adapters have the names of the whole model, which has the text part below another one."""
    modules, targets = {name for name, _ in whole.named_modules()}, adapted.create("a").targets
    for target in targets:
        parent = target.name.rpartition(".")[0]
        whole_name = f"{parent}.{target.part_of}" if target.part_of is not None else target.name
        assert (parent if target.num_experts is not None else whole_name) in modules, target.name
    assert any(part in target.name for target in targets)


def log_softmax(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("kind", ["mistral", "ministral3", "mistral4"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_mistral_with_images_runs_as_the_whole_does(kind: str, is_tied: bool, tmp_path: Path) -> None:
    """Ties the head where only the config of the whole says so."""
    whole = tiny_container(kind, tmp_path, {"tie_word_embeddings": is_tied}, tie_word_embeddings=False)
    adapted = Adapted(tmp_path)
    assert adapted.base.runs_own_layers
    assert (adapted.base.head_name == adapted.base.embedding_name) == is_tied
    assert distance(adapted, whole) < 1e-5
    with torch.no_grad():
        whole.get_input_embeddings().weight.mul_(1.01)
    assert distance(adapted, whole) > 1e-5


@pytest.mark.parametrize("kind", ["llama4", "nemotron_h_moe"])
def test_a_text_part_with_its_own_head_runs_as_the_whole_does(kind: str, tmp_path: Path) -> None:
    whole = tiny_container(kind, tmp_path)
    # transformers 5.24 fails to build the output of llama4's whole, whose logits are those of its part.
    theirs = whole.language_model if kind == "llama4" else whole
    adapted = Adapted(tmp_path)
    assert adapted.base.runs_own_layers
    assert distance(adapted, theirs) < 1e-5
    names = {name for name, _ in whole.named_parameters()}
    ours = {adapted.base.loaded.saved_name(name) for name, _ in adapted.base.model.named_parameters()}
    assert ours <= names
    assert not [name for name in names - ours if name.startswith("language_model.")]
    assert_adapts_modules_of(adapted, whole)
    with torch.no_grad():
        whole.get_input_embeddings().weight.mul_(1.01)
    assert distance(adapted, theirs) > 1e-5


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_qwen_with_images_runs_as_the_whole_does(kind: str, tmp_path: Path) -> None:
    whole = tiny_container(kind, tmp_path)
    adapted = Adapted(tmp_path)
    assert adapted.base.runs_own_layers
    assert not [name for name, _ in adapted.base.model.named_parameters() if "visual" in name]
    assert_adapts_modules_of(adapted, whole)
    assert distance(adapted, whole) < 1e-5
    adapted.base.unembedding.mul_(1.01)
    assert distance(adapted, whole) > 1e-5


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "gemma4_large", "gemma4_moe"])
def test_gemma_with_images_runs_as_the_whole_does(kind: str, tmp_path: Path) -> None:
    whole = tiny_container(kind, tmp_path)
    adapted = Adapted(tmp_path)
    assert adapted.base.runs_own_layers
    assert not [name for name, _ in adapted.base.model.named_parameters() if "vision" in name]
    assert distance(adapted, whole) < 1e-5
    adapted.base.unembedding.mul_(1.01)
    assert distance(adapted, whole) > 1e-5


CORE = ("internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm")
WHOLES = [
    each if each in CORE else pytest.param(each, marks=pytest.mark.full if each == "ovis2" else pytest.mark.slow)
    for each in TEXT_KINDS
]
# Files have matrices of experts [in, out], which must not be square: transformers takes their direction from that.
SPARSE = {"moe_intermediate_size": 24}


def sizes_of(model_type: str) -> dict[str, object]:
    return {**SPARSE} if model_type.endswith("moe") else {}


@pytest.mark.parametrize("model_type", WHOLES)
def test_the_text_part_of_other_models_runs_as_the_whole_does(model_type: str, tmp_path: Path) -> None:
    whole = tiny_whole(model_type, tmp_path, **sizes_of(model_type))
    adapted = Adapted(tmp_path)
    part = "text_model" if hasattr(whole.model, "text_model") else "language_model"
    assert adapted.base.runs_own_layers
    assert_adapts_modules_of(adapted, whole, part)
    names = {name for name, _ in whole.named_parameters()}
    ours = {adapted.base.loaded.saved_name(name) for name, _ in adapted.base.model.named_parameters()}
    assert ours == {name for name in names if name.startswith(("lm_head.", f"model.{part}."))}
    assert distance(adapted, whole) < 1e-5
    with torch.no_grad():
        whole.get_input_embeddings().weight.mul_(1.01)
    assert distance(adapted, whole) > 1e-5


# Fields that change no numbers of text.
WITHOUT_NUMBERS = {"architectures", "model_type", "router_aux_loss_coef", "tie_word_embeddings", "rope_parameters"}
WITH_OWN_TYPE = [
    whole for whole, kind in TEXT_PARTS.items() if CONFIG_MAPPING[whole]().get_text_config().model_type != kind
]


@pytest.mark.parametrize("model_type", WITH_OWN_TYPE)
def test_fields_that_a_text_part_leaves_out_mean_what_they_mean_in_the_whole(model_type: str) -> None:
    """The causal type has other defaults: Glm4Config rotates half of the features, glm4v's text part all of them."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 100}
    whole = CONFIG_MAPPING[model_type].from_dict({"text_config": sizes})
    theirs, ours = whole.get_text_config().to_dict(), text_config_of(whole).to_dict()
    assert {key for key, value in theirs.items() if ours[key] != value} <= WITHOUT_NUMBERS
    rotations = [each["rope_parameters"] for each in (theirs, ours)]
    # Gemma 4's are given for each kind of layer.
    if "rope_theta" not in rotations[0]:
        assert rotations[0] == rotations[1]
    else:
        rotated = [each.get("partial_rotary_factor", 1.0) for each in rotations]
        assert rotated[0] == rotated[1]
        assert rotations[0]["rope_theta"] == rotations[1]["rope_theta"]
    assert ours.get("head_dim", 8) == theirs.get("head_dim", 8)


@pytest.mark.parametrize("model_type", ["glm4v", pytest.param("glm46v", marks=pytest.mark.slow)])
def test_a_text_part_that_names_no_rotated_fraction_rotates_as_the_whole_does(model_type: str, tmp_path: Path) -> None:
    rotations = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    tiny_whole(model_type, tmp_path, rope_parameters=rotations)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["text_config"]["rope_parameters"]["partial_rotary_factor"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = AutoModelForMultimodalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert distance(Adapted(tmp_path), whole) < 1e-5
    config["text_config"]["rope_parameters"]["partial_rotary_factor"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert distance(Adapted(tmp_path), whole) > 1e-3


@pytest.mark.parametrize("model_type", SCALED_APART)
@torch.no_grad()
def test_transformers_leaves_out_the_scale_of_logits_of_text_parts_that_are_refused(
    model_type: str, tmp_path: Path
) -> None:
    """Without it the part for text computes what the whole does, and with it something else."""
    _, setting = SCALED_APART[model_type]
    whole = tiny_whole(model_type, tmp_path, **{setting: 0.5})
    assert setting in str(refusal_of(whole.config.to_dict()))
    weights = {re.sub(r"language_model\.", "", name): each for name, each in whole.state_dict().items()}
    for scale, is_like in ((0.5, False), (1.0, True)):
        text = AutoModelForCausalLM.from_config(
            type(whole.config.text_config).from_dict(whole.config.text_config.to_dict() | {setting: scale})
        ).eval()
        text.load_state_dict({name: weights[name] for name in text.state_dict()})
        found = (log_softmax(text(TOKENS[None]).logits) - log_softmax(whole(TOKENS[None]).logits)).abs().max()
        assert (found < 1e-5) == is_like


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_whole_says_whether_the_head_is_tied(is_tied: bool, tmp_path: Path) -> None:
    """The text part of Qwen3-VL-MoE is tied by default, and the whole is not."""
    config: Any = CONFIG_MAPPING["qwen3_vl_moe"]()
    assert config.text_config.tie_word_embeddings and not config.tie_word_embeddings
    described = describe_model("M", config.to_dict() | {"tie_word_embeddings": is_tied})
    assert isinstance(described, ModelShape) and described.tied_embeddings == is_tied
    whole = tiny_whole("qwen3_vl_moe", tmp_path, **SPARSE, tie_word_embeddings=not is_tied)
    whole.config.tie_word_embeddings = is_tied
    whole.config.save_pretrained(tmp_path)
    shape = Adapted(tmp_path).base.shape
    assert isinstance(shape, ModelShape) and shape.tied_embeddings == is_tied


def test_every_text_part_is_compared() -> None:
    compared = {*TEXT_KINDS, *(model_type for model_type, _ in CONTAINERS.values()), "kimi_k25"}
    assert compared == set(TEXT_PARTS)


def test_files_of_earlier_versions_have_other_names(tmp_path: Path) -> None:
    """Releases of Qwen2-VL have no text_config, and their text part has no name of its own."""
    whole = tiny_whole("qwen2_vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = text.pop("rope_parameters") | {"type": "mrope", "rope_type": "mrope"}
    text["rope_theta"] = text["rope_scaling"].pop("rope_theta")
    (tmp_path / "config.json").write_text(json.dumps(text | config))
    file = tmp_path / "model.safetensors"
    tensors = {re.sub(r"^model\.(language_model\.|)", "", name): each for name, each in load_file(file).items()}
    named = {
        name if name.startswith(("visual.", "lm_head.")) else f"model.{name}": each for name, each in tensors.items()
    }
    save_file(named, file, metadata={"format": "pt"})
    adapted = Adapted(tmp_path)
    assert adapted.base.runs_own_layers and distance(adapted, whole) < 1e-5


def test_kimi_is_read_from_the_names_of_its_releases(tmp_path: Path) -> None:
    text = tiny_model("deepseek_v3", tmp_path / "text")
    release = kimi_container(text, tmp_path / "release")
    theirs = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
    assert distance(Adapted(release), theirs) < 1e-5


def test_a_type_that_transformers_knows_by_another_name_is_read_as_that(tmp_path: Path) -> None:
    tiny_model("deepseek_v3", model := tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    adapted = Adapted(model)
    assert adapted.base.runs_own_layers and distance(adapted, theirs) < 1e-5


def test_hunyuan_may_choose_another_number_of_experts_in_each_layer(tmp_path: Path) -> None:
    model = tiny_model("hunyuan_v1_moe", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"moe_topk": [2, 1]}))
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = Adapted(model)
    assert adapted.base.runs_own_layers and distance(adapted, theirs) < 1e-5
    (model / "config.json").write_text(json.dumps(config | {"moe_topk": [2, 2]}))
    assert distance(Adapted(model), theirs) > 1e-5
    (model / "config.json").write_text(json.dumps(config | {"moe_topk": [2]}))
    with pytest.raises(ValueError, match="moe_topk has 1 numbers for 2 layers"):
        Adapted(model)

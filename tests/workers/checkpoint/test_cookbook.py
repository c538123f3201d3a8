"""tinker-cookbook merges and converts our adapters of every served model type.

The cookbook's functions run unchanged. `make setup` installs them.
"""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from trainhouse.schemas.adapters.adapter_files import write_for_cookbook, write_for_peft, write_for_vllm
from trainhouse.schemas.adapters.vllm_form import FORMS, VllmForm
from trainhouse.workers.checkpoint import read_new_model
from trainhouse.workers.lora import Adapter
from trainhouse.workers.shapes.model_shape import ModelShape
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ...tiny import tiny_model
from ..adapted import Adapted, quieten_peft, sequences
from ..containers import TEXT_KINDS, kimi_container, tiny_container, tiny_whole
from ..models.test_text_parts import sizes_of
from .test_adapted_types import (
    EVERY,
    TOLERANCE,
    adapted_tiny,
    distance,
    distance_of_logits,
    exported,
    in_peft_from,
)

weights: Any = pytest.importorskip("tinker_cookbook.weights", reason="make setup installs tinker-cookbook")

# Limits of the cookbook, as docs/checkpoints.md lists them.
# Its functions know experts' layers as gate_proj, up_proj and down_proj, and the files of these have w1, w2 and w3.
SEPARATE: dict[str, str] = dict.fromkeys(("minimax_m2", "mixtral", "phimoe"), "Expert LoRA weights must be 3D")
# Only the head is adapted, which is tied.
HEAD_ALONE = dict.fromkeys(("gpt2", "gpt-sw3", "jetmoe"), "mapped to 'lm_head.weight'")
# It writes no adapters of these for vLLM and SGLang.
NOT_SERVED = ("deepseek_v3",)
# Linear layers of which the file has one pair of a larger rank, which the config that it writes does not name.
JOINED = ("bamba", "falcon_h1", "granitemoehybrid", "qwen3_5_moe_text", "qwen3_5_text")
# What it writes of these has the names that vLLM has: projections are fused, or have their names in files.
AS_IN_VLLM = dict.fromkeys((*JOINED, "nemotron_h"), VllmForm()) | {"hy_v3": FORMS["HYV3ForCausalLM"]}
# PEFT refuses what it writes of these, because of out_proj or such ranks.
REFUSED_BY_PEFT = {
    **dict.fromkeys(JOINED, "size mismatch for "),
    **dict.fromkeys(("falcon_h1", "nemotron_h"), "'out_proj' is incompatible with Mamba-based models"),
}
# Matrices of experts are not square: the cookbook takes their directions from their sizes.
SPARSE = {kind: {"moe_intermediate_size": 24} for kind in ("mistral4", "qwen3_5_moe")}
# It knows no other names than those of the modules for the head of gpt_neox, for layers of EXAONE 3 and Sarvam 30B, and
# for experts whose weights are in one tensor of another name than gate_up_proj.
UNKNOWN = {
    **SEPARATE,
    **HEAD_ALONE,
    "gpt_neox": "mapped to 'lm_head.weight'",
    **dict.fromkeys(("exaone", "sarvam_moe"), r"mapped to 'model.layers.0.\w+.\w+.weight'"),
    **dict.fromkeys(
        ("granitemoe", "granitemoehybrid", "granitemoeshared"),
        r"mapped to 'model.layers.0.block_sparse_moe.experts.0.\w+.weight'",
    ),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def given(adapter: Adapter, directory: Path) -> Path:
    exported(adapter, directory)
    (directory / "optimizer.safetensors").unlink()
    write_for_cookbook(directory)
    return directory


def merged(model: Path, adapter: Path, output: Path) -> torch.nn.Module:
    weights.build_hf_model(base_model=str(model), adapter_path=str(adapter), output_path=str(output))
    return AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)


def is_tied(adapted: Adapted) -> bool:
    return adapted.base.head_name == adapted.base.embedding_name


def is_cut_by_peft(adapted: Adapted) -> bool:
    """True if PEFT drops matrices of what the cookbook writes: of shared experts and dense layers in sparse models,
    since target_modules alone names them, and of experts of which transformers has no such modules."""
    shape = adapted.base.shape
    if not isinstance(shape, ModelShape):
        return shape.model_type == "cohere2_moe"
    if (experts := shape.experts) is None:
        return False
    has_dense = any(layer.feed_forward is not None and layer.experts is None for layer in shape.layers)
    return has_dense or experts.are_stacked or experts.shared is not None


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EVERY)
def test_the_cookbook_takes_adapters(model_type: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    adapted = adapted_tiny(model_type, model)
    adapter = adapted.create("run", train_unembed=model_type in HEAD_ALONE or not is_tied(adapted))
    directory = given(adapter, tmp_path / "here")
    if model_type in UNKNOWN:
        with pytest.raises(Exception, match=UNKNOWN[model_type]):
            merged(model, directory, tmp_path / "merged")
        return
    tuned = merged(model, directory, tmp_path / "merged")
    moved = distance(adapted, None, tuned)
    assert distance(adapted, adapter, tuned) < TOLERANCE * moved
    without_one = load_file(directory / "adapter_model.safetensors")
    last = [name for name in without_one if ".lora_B." in name and ".lm_head." not in name][-1]
    without_one[last].zero_()
    save_file(without_one, directory / "adapter_model.safetensors")
    assert distance(adapted, adapter, merged(model, directory, tmp_path / "less")) > 10 * TOLERANCE * moved


def test_the_cookbook_merges_mamba_beside_dense_layers(tmp_path: Path) -> None:
    model = tiny_model("granite4", tmp_path / "model")
    adapted = Adapted(model)
    adapter = adapted.create("run", train_unembed=not is_tied(adapted))
    tuned = merged(model, given(adapter, tmp_path / "here"), tmp_path / "merged")
    moved = distance(adapted, None, tuned)
    assert distance(adapted, adapter, tuned) < TOLERANCE * moved
    for name, pair in adapter.pairs.items():
        if name.endswith("mamba.x_proj"):
            pair.b.zero_()
    assert distance(adapted, adapter, tuned) > 10 * TOLERANCE * moved


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EVERY)
def test_the_cookbook_converts_adapters_to_ours_for_peft(model_type: str, tmp_path: Path) -> None:
    adapted = adapted_tiny(model_type, tmp_path / "model")
    adapter = adapted.create("run")
    own = exported(adapter, tmp_path / "ours")
    if (form := AS_IN_VLLM.get(model_type)) is not None:
        write_for_vllm(own, form)
    ours = load_file(own / "adapter_model.safetensors")
    options = {"base_model": str(tmp_path / "model"), "output_path": str(tmp_path / "peft")}
    directory = given(adapter, tmp_path / "here")
    if model_type in (*SEPARATE, *NOT_SERVED):
        with pytest.raises(Exception, match=SEPARATE.get(model_type, "does not support LoRA adapter serving")):
            weights.build_lora_adapter(adapter_path=str(directory), **options)
        return
    weights.build_lora_adapter(adapter_path=str(directory), **options)
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
    if model_type in REFUSED_BY_PEFT:
        with pytest.raises((RuntimeError, ValueError), match=REFUSED_BY_PEFT[model_type]):
            in_peft_from(tmp_path / "model", tmp_path / "peft")
        return
    off = distance(adapted, adapter, in_peft_from(tmp_path / "model", tmp_path / "peft"))
    moved = distance(adapted, adapter, AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32))
    assert off > 0.1 * moved if is_cut_by_peft(adapted) else off < TOLERANCE * moved


# Files of these call the text part language_model.model, PEFT model.language_model.
OF_TWO_NAMES = [each for each in TEXT_KINDS if each.startswith("llava") or each in ("got_ocr2", "internvl", "vipllava")]
OF_TWO_NAMES += ["qianfan_ocr", "qwen2_audio", "voxtral"]
MERGED_WHOLES = [
    each if each in ("qwen3_vl", "qwen3_vl_moe") else pytest.param(each, marks=pytest.mark.full)
    for each in TEXT_KINDS
    if each not in (*OF_TWO_NAMES, "ovis2", "gemma4_unified")  # it takes the last one's prefix twice
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma4", "qwen3_5", "qwen3_5_moe", "kimi", *MERGED_WHOLES])
def test_the_cookbook_merges_adapters_of_the_text_part_of_models_with_images(kind: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    if kind == "kimi":
        kimi_container(tiny_model("deepseek_v3", tmp_path / "text"), model)
    elif kind in TEXT_KINDS:
        tiny_whole(kind, model, **sizes_of(kind))
    else:
        tiny_container(kind, model, {"tie_word_embeddings": False}, **SPARSE.get(kind, {}))
    adapted = Adapted(model)
    adapter = adapted.create("run", train_unembed=not is_tied(adapted))
    directory = given(adapter, tmp_path / "here")
    weights.build_hf_model(base_model=str(model), adapter_path=str(directory), output_path=str(tmp_path / "merged"))
    data = sequences(vocab_size=adapted.base.vocab_size)
    with torch.no_grad():
        ours, before = adapted.logits(data, adapter), adapted.logits(data, None)
        found = Adapted(tmp_path / "merged").logits(data, None)
    assert distance_of_logits(ours, found) < TOLERANCE * distance_of_logits(ours, before)
    assert torch.equal(read_new_model(adapted.models, directory).weights, adapter.weights)
    write_for_peft(directory)
    names = load_file(directory / "adapter_model.safetensors")
    assert names and not any(".model.layers." in name for name in names)


# Whether PEFT loads what the cookbook writes.
IN_PEFT = {"gemma3": True, "mistral": True, "mistral4": False, "qwen3_5": False, "qwen3_5_moe": False}
IN_PEFT |= {"internvl": True, "llava": True, "qwen3_vl": True, "qwen3_vl_moe": False, "smolvlm": True}


@pytest.mark.slow
@pytest.mark.parametrize("kind", IN_PEFT)
def test_the_cookbook_converts_adapters_of_the_text_part_of_models_with_images(kind: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    if kind in TEXT_KINDS:
        tiny_whole(kind, model, **sizes_of(kind))
    else:
        tiny_container(kind, model, {"tie_word_embeddings": False}, **SPARSE.get(kind, {}))
    adapted = Adapted(model)
    adapter = adapted.create("run", train_unembed=not is_tied(adapted))
    options = {"base_model": str(model), "adapter_path": str(given(adapter, tmp_path / "here"))}
    weights.build_lora_adapter(**options, output_path=str(tmp_path / "peft"))
    off, moved = (distance(adapted, adapter, each) for each in whole_in_peft(model, tmp_path / "peft"))
    assert off < TOLERANCE * moved if IN_PEFT[kind] else off > 0.1 * moved
    if kind in ("gemma3", "mistral", "mistral4", *OF_TWO_NAMES):
        with pytest.raises(weights._merge.WeightsMergeError, match=r"mapped to '(lm_head|model\.language_model)\."):
            weights.build_hf_model(**options, output_path=str(tmp_path / "merged"))


def whole_in_peft(model: Path, directory: Path) -> Iterator[torch.nn.Module]:
    """Yields the model with the adapter, and without."""
    tuned, bare = (AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    with warnings.catch_warnings():
        quieten_peft()
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # of the part for images
        yield PeftModel.from_pretrained(tuned, str(directory))
    yield bare


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gemma3_text"])
def test_peft_loads_what_the_cookbook_converts(model_type: str, tmp_path: Path) -> None:
    """Including a tied head, because our files call it lm_head."""
    adapted = adapted_tiny(model_type, tmp_path / "model")
    adapter = adapted.create("run")
    options = {"base_model": str(tmp_path / "model"), "output_path": str(tmp_path / "peft")}
    weights.build_lora_adapter(adapter_path=str(given(adapter, tmp_path / "here")), **options)
    tuned = in_peft_from(tmp_path / "model", tmp_path / "peft")
    assert distance(adapted, adapter, tuned) < TOLERANCE * distance(adapted, None, tuned)


def test_the_cookbook_refuses_a_tied_head_instead_of_merging_it_into_the_embedding(tmp_path: Path) -> None:
    model = tmp_path / "model"
    adapted = adapted_tiny("gemma3_text", model)
    adapter = adapted.create("run")
    directory = given(adapter, tmp_path / "here")
    with pytest.raises(weights._merge.WeightsMergeError, match=r"mapped to 'lm_head\.weight' which does not exist"):
        merged(model, directory, tmp_path / "merged")
    # Under the service's own name it would be merged into the embedding, which changes the model's input.
    tensors = load_file(directory / "adapter_model.safetensors")
    renamed = {name.replace(".lm_head.", ".model.unembed_tokens."): each for name, each in tensors.items()}
    save_file(renamed, directory / "adapter_model.safetensors")
    assert distance(adapted, adapter, merged(model, directory, tmp_path / "other")) > 0.1

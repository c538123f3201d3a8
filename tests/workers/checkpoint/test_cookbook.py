"""tinker-cookbook merges and converts our adapters of every served model type.

The cookbook's functions run unchanged. `make setup` installs them.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainhouse.schemas.adapters.adapter_files import write_for_cookbook, write_for_vllm
from trainhouse.schemas.adapters.vllm_form import VllmForm
from trainhouse.workers.lora import Adapter
from transformers import AutoModelForCausalLM

from ..adapted import Adapted
from .test_adapted_types import EVERY, TOLERANCE, adapted_tiny, distance, exported, in_peft_from

weights: Any = pytest.importorskip("tinker_cookbook.weights", reason="make setup installs tinker-cookbook")

# Types of which the cookbook knows no names, because their files differ from transformers' modules, or only a tied head
# is adapted. `trainhouse export --merge-into` merges them.
SEPARATE = dict.fromkeys(("minimax_m2", "mixtral", "phimoe"), "Expert LoRA weights must be 3D")
HEAD_ALONE = dict.fromkeys(("gpt2", "gpt-sw3", "jetmoe"), "mapped to 'lm_head.weight'")
# The cookbook writes no adapters of these for vLLM and SGLang.
NOT_SERVED = ("deepseek_v3",)
# Of these the cookbook knows which projections are fused in files.
FUSED = ("nemotron_h",)
UNKNOWN = {
    **SEPARATE,
    **HEAD_ALONE,
    "gpt_neox": "mapped to 'lm_head.weight'",
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), r"mapped to 'model.layers.0.mamba.gate_proj.weight'"),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared"), r"mapped to 'model.layers.0.block_sparse_moe.experts.0.\w+.weight'"
    ),
    # Of these it knows the names in releases with images, whose text part this is.
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"), r"mapped to 'model.layers.\d.linear_attn.in_proj_\w+.weight'"
    ),
    "hy_v3": r"mapped to 'model.layers.1.mlp.shared_experts.\w+.weight'",
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


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EVERY)
def test_the_cookbook_converts_adapters_to_ours_for_peft(model_type: str, tmp_path: Path) -> None:
    adapter = adapted_tiny(model_type, tmp_path / "model").create("run")
    own = exported(adapter, tmp_path / "ours")
    if model_type in FUSED:
        write_for_vllm(own, VllmForm())
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

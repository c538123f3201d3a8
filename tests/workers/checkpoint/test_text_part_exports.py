"""Adapters of the text part of models that take images too: peft loads them into the whole, and they are merged into
its files."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from trainhouse.schemas.adapters.adapter_files import write_for_peft
from trainhouse.schemas.adapters.merged_model import merge_into_base
from transformers import AutoModelForMultimodalLM

from ..adapted import Adapted, quieten_peft
from ..containers import TEXT_KINDS, tiny_container, tiny_whole
from ..models.test_text_parts import sizes_of
from .test_adapted_types import TOLERANCE, assert_reimported_unchanged, distance, exported

CORE = ("qwen3_vl_moe", "smolvlm")
KINDS = [
    *(each if each in CORE else pytest.param(each, marks=pytest.mark.slow) for each in TEXT_KINDS if each != "ovis2"),
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3", "mistral", "llama4", "qwen3_5")),
]


def read(directory: Path) -> Any:
    whole: Any = AutoModelForMultimodalLM.from_pretrained(directory, dtype=torch.float32)
    if whole.config.model_type == "llama4":  # transformers 5.24 fails to build the whole's output
        whole.forward = lambda input_ids, **_: whole.language_model(input_ids=input_ids)
    return whole


def as_released(file: Path) -> None:
    """Stores matrices of experts [in, out]."""
    tensors = {name: each.mT.contiguous() if ".experts." in name else each for name, each in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_peft_and_merged_files_give_the_same_for_text(kind: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    if kind in TEXT_KINDS:
        tiny_whole(kind, model, **sizes_of(kind))
    else:
        tiny_container(kind, model)
    if kind == "qwen3_vl_moe":
        as_released(model / "model.safetensors")
    adapted = Adapted(model)
    adapter = adapted.create("run")
    directory = exported(adapter, tmp_path / "here")
    write_for_peft(directory)
    with warnings.catch_warnings():
        quieten_peft()
        tuned = PeftModel.from_pretrained(read(model), str(directory))
    adapters = [name for name in tuned.state_dict() if ".lora_" in name]
    assert all(re.search(r"\.(language_model|text_model|lm_head)\.", name) for name in adapters), "not the encoders'"
    moved = distance(adapted, adapter, read(model))
    assert distance(adapted, adapter, tuned) < TOLERANCE * moved
    merge_into_base(directory, model, tmp_path / "merged")
    assert distance(adapted, adapter, read(tmp_path / "merged")) < TOLERANCE * moved
    assert_reimported_unchanged(adapted, directory, tmp_path / "back")
    last = [each for name, each in tuned.named_parameters() if ".lora_B." in name][-1]
    last.data.zero_()
    assert distance(adapted, adapter, tuned) > 10 * TOLERANCE * moved

"""Projections that are adapted apart and fused in the model's files: for peft they are one pair of their joint rank."""

import json
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from trainhouse.schemas.adapters.adapter_files import write_for_peft
from trainhouse.schemas.adapters.peft import CONFIG, DESCRIPTION, WEIGHTS
from transformers import AutoModelForCausalLM

from ..adapted import peft_logits, quieten_peft, sequences

RANK, ALPHA = 4, 32
PARTS = {"q": 64, "k": 32, "v": 32}  # outputs in qkv_proj of the tiny Phi-3


def test_peft_loads_three_projections_as_one_of_three_times_the_rank(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_models["phi3"], dtype=torch.float32)
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    wanted = AutoModelForCausalLM.from_pretrained(tiny_models["phi3"], dtype=torch.float32)
    for number, layer in enumerate(wanted.model.layers):
        changes = []
        for part, outputs in PARTS.items():
            a, b = torch.randn(RANK, 64) * 0.1, torch.randn(outputs, RANK) * 0.1
            path = f"base_model.model.model.layers.{number}.self_attn.{part}"
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
            changes.append(ALPHA / RANK * b @ a)
        layer.self_attn.qkv_proj.weight.data += torch.cat(changes)
    save_file(tensors, tmp_path / WEIGHTS)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": sorted(PARTS)}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    (tmp_path / DESCRIPTION).write_text(json.dumps({"fused_projections": {"qkv_proj": list(PARTS)}}))
    write_for_peft(tmp_path)
    data = sequences()
    with torch.no_grad(), warnings.catch_warnings():
        quieten_peft()
        bare, ours = peft_logits(base, data), peft_logits(wanted, data)
        theirs = peft_logits(PeftModel.from_pretrained(base, str(tmp_path)), data)
    assert float((theirs - ours).abs().max()) < 1e-5 * float((ours - bare).abs().max())
    assert float((ours - bare).abs().max()) > 0.1

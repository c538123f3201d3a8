"""The reference of training: transformers' own model with a rank's exported adapter in peft, one sequence at a time."""

import json
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from trainhouse.schemas.adapters.adapter_files import write_for_peft
from trainhouse.schemas.training import Datum
from transformers import AutoModelForCausalLM

from .adapted import peft_gradients, quieten_peft, stacked_gradients

# Layers of which adapters adapt some ranges of rows apart, and peft all by one pair.
_FUSED = {"in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"), "in_proj": ("gate_proj", "x_proj")}

# An expert's gate, if any, up and down projection.
_LINEARS = ("gate_proj", "w1", "up_proj", "w3", "down_proj", "w2")


class PeftReference:
    """An exported adapter on transformers' model; layers that peft refuses to adapt are adapted by hand."""

    def __init__(self, model: Path, exported: Path, dtype: torch.dtype = torch.float32) -> None:
        """Loads both.

        Args:
            exported: by a rank, or by peft itself.
            dtype: of the model and of the adapter.
        """
        described = exported / "trainhouse.json"
        self._description = json.loads(described.read_text()) if described.exists() else {}
        base = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
            quieten_peft()
            files = shutil.copytree(exported, Path(directory) / "adapter")
            if self._description:
                write_for_peft(files)
            by_hand = self._taken_out(files)
            self.model: Any = PeftModel.from_pretrained(base, files, is_trainable=True).eval().to(dtype)
        for path in {name.partition(".lora_")[0] for name in by_hand}:
            a, b = (by_hand[f"{path}.lora_{side}.weight"].to(dtype) for side in "AB")
            adapted = AdaptedByHand(self.model.get_submodule(path), a, b, self._scale)
            self.model.set_submodule(path, adapted)

    @property
    def _scale(self) -> float:
        lora = self._description["lora"]
        return lora["alpha"] / lora["rank"]

    def _taken_out(self, exported: Path) -> dict[str, Tensor]:
        """Takes the matrices of layers that peft refuses out of the adapter's files, and returns them."""
        kind = self._description.get("refused_by_peft")
        if kind is None:
            return {}
        weights, config = exported / "adapter_model.safetensors", exported / "adapter_config.json"
        tensors = load_file(weights)
        taken = {name: each for name, each in tensors.items() if f".{kind}.lora_" in name}
        save_file({name: each for name, each in tensors.items() if name not in taken}, weights)
        described = json.loads(config.read_text())
        described["target_modules"] = [name for name in described["target_modules"] if not name.endswith(kind)]
        config.write_text(json.dumps(described))
        return taken

    def loss_of(self, data: Sequence[Datum]) -> tuple[Tensor, list[np.ndarray]]:
        """Returns the weighted sum of negative log-probabilities of the targets, and the log-probabilities."""
        loss, logprobs = torch.zeros(()), []
        for datum in data:
            targets, weights = (torch.from_numpy(datum.loss_fn_inputs[name]) for name in ("target_tokens", "weights"))
            row_logprobs = self.log_softmax(datum.tokens).gather(1, targets.long()[:, None])[:, 0]
            loss = loss - (weights * row_logprobs).sum()
            logprobs.append(row_logprobs.detach().numpy())
        return loss, logprobs

    def log_softmax(self, tokens: np.ndarray) -> Tensor:
        """Returns [tokens, vocab]."""
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        return self.model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)

    def gradients(self, ours: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the gradients after `backward`, by the names in a snapshot.

        Args:
            ours: the gradients of that snapshot.
        """
        experts = self._experts(ours)
        found = peft_gradients(self.model, *experts, **self._stacked)
        if self._description["lora"]["expert_factors"] == "shared":
            found = stacked_gradients(found, *experts)
        # Files of some models have the shared experts under another name than modules.
        in_files = "shared_mlp" if any(".shared_mlp." in name for name in ours) else "shared_expert"
        found = {
            name if name in ours else name.replace("shared_experts", in_files): each for name, each in found.items()
        }
        return {name: each.numpy() for name, each in _of_parts(found, ours).items()}

    def _experts(self, ours: Mapping[str, np.ndarray]) -> tuple[int, Sequence[str]]:
        """Returns the number of experts, and the names of an expert's layers in files."""
        if stacked := self._description.get("expert_linears"):
            num = max(len(each) for name, each in ours.items() if ".experts." in name)
            return num, sorted(stacked.values(), key=_LINEARS.index)
        names = [name.partition(".experts.")[2].split(".") for name in ours if ".experts." in name]
        return len({number for number, *_ in names}), sorted({kind for _, kind, *_ in names}, key=_LINEARS.index)

    @property
    def _stacked(self) -> dict[str, bool]:
        stacked = self._description.get("stacked_experts") or {}
        return {"are_misread": stacked.get("is_misread", False), "alternate": stacked.get("alternates", False)}


class AdaptedByHand(nn.Module):
    """A linear layer with an adapter's pair of matrices, in place of peft's."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.lora_A, self.lora_B = (nn.ParameterDict({"weight": each}) for each in (a, b))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * linear(linear(x, self.lora_A["weight"]), self.lora_B["weight"])


def _of_parts(wanted: Mapping[str, Tensor], ours: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Splits the gradients of a layer of which we adapt some ranges of rows apart, and peft all by one pair."""
    split = {}
    for name, gradient in wanted.items():
        path, _, side = name.partition(".lora_")
        layer, _, whole = path.rpartition(".")
        parts = [f"{layer}.{part}.lora_{side}" for part in _FUSED.get(whole, ())]
        ranks = np.array_split(np.arange(gradient.shape[0 if side.startswith("A") else 1]), max(1, len(parts)))
        if side.startswith("A"):
            split |= {part: gradient[rank] for part, rank in zip(parts, ranks, strict=False)}
            split |= {} if parts else {name: gradient}
            continue
        stops = np.cumsum([len(ours[part]) for part in parts])
        rows = [slice(stop - len(ours[part]), stop) for part, stop in zip(parts, stops, strict=True)]
        split |= {part: gradient[row][:, rank] for part, row, rank in zip(parts, rows, ranks, strict=False)}
        split |= {} if parts else {name: gradient}
    return split

"""Adapters as PEFT has them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...schemas.errors import OperationError
from ...schemas.models import LoraConfig
from ..lora import Adapter
from .description import Description, few, write_json


class Peft:
    """See Form."""

    stem, is_small = "adapter_model", True

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def describe(self) -> dict[str, Any]:
        return {"targets": [target.name for target in self._adapter.targets]}

    def check(self, saved: Description) -> None:
        adapter, theirs = self._adapter, saved.training
        if not isinstance(theirs, LoraConfig):
            raise OperationError(
                "the checkpoint has all weights of a model, and the model trains an adapter: create one with"
                " training full and load into that"
            )
        for name in ("rank", "alpha"):
            of_model, of_saved = getattr(adapter.lora, name), getattr(theirs, name)
            if of_model != of_saved:
                raise OperationError(
                    f"the checkpoint was saved with {name} {of_saved}, the model has {name} {of_model}:"
                    f" create a model with {name} {of_saved} and load into that"
                )
        own, others = {target.name for target in adapter.targets}, saved.targets
        if own != others:
            raise OperationError(
                f"the checkpoint adapts other layers than the model: only the checkpoint has {few(others - own)},"
                f" only the model has {few(own - others)}; use the train_attn, train_mlp and train_unembed it was"
                " saved with"
            )

    def constants(self) -> Mapping[str, Tensor]:
        return {}

    def write_beside(self, directory: Path, base_name: str) -> None:
        write_json(directory / "adapter_config.json", _config(self._adapter, base_name))

    def take(self, constants: Mapping[str, Tensor], saved: Description) -> None:
        pass


def _config(adapter: Adapter, base_name: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": adapter.program.peft_task,
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": adapter.lora.rank,
        "lora_alpha": adapter.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "target_modules": sorted({target.saved_kind for target in adapter.targets}),
        "modules_to_save": list(adapter.program.peft_modules) or None,
        **_dense_beside_experts(adapter),
    }


def _dense_beside_experts(adapter: Adapter) -> dict[str, Any]:
    """PEFT takes the kinds of layers that experts have for those of experts alone, unless others are named by weight.

    Its rank and scale of a pair are then those of the whole, as of experts.
    """
    of_experts = {target.saved_kind for target in adapter.targets if target.num_experts is not None}
    dense = {target.name for target in adapter.targets if target.num_experts is None and target.kind in of_experts}
    paths = {".".join(name.split(".")[-2:]) for name in dense}
    return {"target_parameters": sorted(f"{path}.weight" for path in paths)} if paths else {}

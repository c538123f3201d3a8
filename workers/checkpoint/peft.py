"""What PEFT wants to know of an adapter: adapter_config.json."""

from typing import Any

from ..lora import Adapter


def peft_config(adapter: Adapter, base_name: str) -> dict[str, Any]:
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

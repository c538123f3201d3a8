"""Stores adapters in the form of PEFT."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...schemas.adapters.adapter_files import name_for_cookbook
from ...schemas.adapters.peft import GATE_UP_PATTERN, LAYOUT_VERSION, matrix_names
from ...schemas.errors import OperationError
from ...schemas.models import LoraConfig
from ..lora import Adapter, Target
from ..lora.target import parts_of_layers
from .checkpoint_format import CheckpointFormat
from .description import CheckpointDescription, few, write_json
from .tensor_files import Place

_KINDS_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


class PeftFormat(CheckpointFormat):
    stem, is_read_at_once = "adapter_model", True

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._renamed = [target for target in adapter.targets if target.saved_path is not None]

    def describe(self) -> dict[str, Any]:
        adapter = self._adapter
        described: dict[str, Any] = {"targets": [target.name for target in adapter.targets]}
        # For the form in vLLM.
        of_base = {"architecture": adapter.architecture, "head_features": adapter.head_features}
        described |= {name: value for name, value in of_base.items() if value is not None}
        if adapter.unembed is not None and adapter.tied_embedding is not None:
            described["tied_head"] = {"head": adapter.unembed_name, "embedding": adapter.tied_embedding}
        if adapter.shares_factors:
            # The names of an expert's layers in PEFT's files by those in ours.
            sharing = [target for target in adapter.targets if target.shared is not None]
            described["expert_linears"] = {target.stacked_as: target.saved_kind for target in sharing}
        if (experts := adapter.stacked_experts) is not None:
            described["stacked_experts"] = {
                "alternates": experts.alternates,
                "has_gate": experts.has_gate,
                "is_transposed": experts.is_transposed and not experts.is_misread,
                "is_misread": experts.is_misread,
            }
        if layers := parts_of_layers(adapter.targets):
            of_layers = {path.rpartition(".")[2]: parts for path, parts in layers.items()}
            described["fused_projections"] = {name: [part.kind for part in parts] for name, parts in of_layers.items()}
            described["fused_outputs"] = {name: parts[0].whole_features for name, parts in of_layers.items()}
        if adapter.refused_by_peft in {target.kind for target in adapter.targets}:
            described["refused_by_peft"] = adapter.refused_by_peft
        return described

    def check(self, saved: CheckpointDescription) -> None:
        adapter, theirs = self._adapter, saved.training
        if not isinstance(theirs, LoraConfig):
            raise OperationError(
                "the checkpoint has all weights of a model, and the model trains an adapter: create a model with"
                " training full and load into that"
            )
        for name in ("rank", "alpha"):
            of_model, of_saved = getattr(adapter.lora, name), getattr(theirs, name)
            if of_model != of_saved:
                raise OperationError(
                    f"the checkpoint was saved with {name} {of_saved}, the model has {name} {of_model}:"
                    f" create a model with {name} {of_saved} and load into that"
                )
        own, others = {target.name for target in adapter.targets}, saved.adapted_layers
        in_both = {target.name for target in adapter.targets if target.num_experts is not None} & others
        if in_both and adapter.shares_factors != (theirs.expert_factors == "shared"):
            factors = theirs.expert_factors or "each"
            raise OperationError(
                f"the checkpoint was saved with expert_factors {factors!r}, and the model has others: create a model"
                f" from the checkpoint (create_training_client_from_state), or one with expert_factors {factors!r},"
                " and load into that"
            )
        if own != others and not (others < own and _groups(theirs) == _groups(adapter.lora)):
            raise OperationError(
                f"the checkpoint adapts other layers than the model: only the checkpoint has {few(others - own)},"
                f" only the model has {few(own - others)}; use the train_attn, train_mlp and train_unembed it was"
                " saved with"
            )

    def legacy_name(self, name: str) -> str:
        for target in self._renamed:
            name = name.replace(f"{target.saved_path}.lora_", f"{target.name}.lora_")
        return name_for_cookbook(name, self._adapter.architecture)

    def joined_tensors(self) -> Mapping[str, Mapping[str, Place]]:
        """Returns the places of the matrices of parts of linear layers in the pair of the whole layer, which has the
        sum of their ranks."""
        rank = self._adapter.lora.rank
        places: dict[str, dict[str, Place]] = {}
        for whole, parts in parts_of_layers(self._adapter.targets).items():
            row = 0
            for number, part in enumerate(parts):
                rows, ranks = slice(row, row + part.out_features), slice(number * rank, (number + 1) * rank)
                of_both = (ranks, slice(None)), (rows, ranks)
                for name, own, place in zip(matrix_names(whole), matrix_names(part.name), of_both, strict=True):
                    places.setdefault(name, {})[own] = place
                row += part.out_features
        return {**places}

    def missing_tensors(self, saved: CheckpointDescription) -> set[str]:
        """Returns the tensors of layers that the checkpoint does not adapt: earlier versions adapted fewer layers of
        some models."""
        others = saved.adapted_layers
        sides = [
            side
            for target in self._adapter.targets
            if target.name not in others
            for side in target.unsharded().matrices(1)
        ]
        return {name for side in sides for name, _ in side.named_tensors(torch.empty(side.shape, device="meta"))}

    def write_extra_files(self, directory: Path, base_name: str) -> None:
        write_json(directory / "adapter_config.json", _config(self._adapter, base_name))


def _groups(lora: LoraConfig) -> tuple[bool, bool, bool]:
    return lora.train_attn, lora.train_mlp, lora.train_unembed


def _config(adapter: Adapter, base_name: str) -> dict[str, Any]:
    rank, alpha = adapter.lora.rank, adapter.lora.alpha
    config = {
        "peft_type": "LORA",
        "peft_version": LAYOUT_VERSION,
        "task_type": adapter.program.peft_task,
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "target_modules": sorted(_target_modules(adapter)),
    }
    if adapter.text_part_name is not None:
        # Layers outside the part for text; encoders of images have some of the same names.
        config["exclude_modules"] = rf"(?!.*\b{adapter.text_part_name}\.|lm_head$).*"
    config["modules_to_save"] = list(adapter.program.peft_modules) or None
    if parameters := _target_parameters(adapter):
        config["target_parameters"] = sorted(parameters)
    if any(target.kind == "gate_proj" and target.num_experts is not None for target in adapter.targets):
        # Gate and up of an expert are one parameter, but have a pair of matrices each.
        config |= {"rank_pattern": {GATE_UP_PATTERN: 2 * rank}, "alpha_pattern": {GATE_UP_PATTERN: 2 * alpha}}
    return config


def _taken_for_experts(adapter: Adapter) -> set[Target]:
    """Returns the linear layers of shared experts and dense layers whose matrices peft would drop.

    In many sparse models peft takes gate_proj, up_proj and down_proj among modules for those of the experts only. Not
    so where files have the experts of a layer in one tensor.
    """
    if not _finds_experts_by_module(adapter):
        return set()
    linears = (target for target in adapter.targets if target.num_experts is None and target.part_of is None)
    return {target for target in linears if target.kind in _KINDS_OF_EXPERTS}


def _finds_experts_by_module(adapter: Adapter) -> bool:
    return adapter.base_is_sparse and adapter.stacked_experts is None


def _target_modules(adapter: Adapter) -> set[str]:
    """Returns suffixes of the names of the linear layers by which peft finds them."""
    taken = _taken_for_experts(adapter)
    others = {name.rpartition(".")[2] for name in adapter.not_adapted}
    modules: set[str] = set()
    for target in adapter.targets:
        if target.num_experts is not None:
            # If transformers has a module for each expert, peft finds it by this name.
            modules |= {target.saved_kind} if _finds_experts_by_module(adapter) and not taken else set()
        elif target not in taken:
            modules.add(target.path if target.kind in others or target.part_of is not None else target.kind)
    return modules


def _target_parameters(adapter: Adapter) -> set[str]:
    """Returns suffixes of the names of other parameters: those that hold a layer of all experts, and weights of linear
    layers that peft does not find among modules."""
    # exclude_modules is not for parameters, and encoders of images have some of the same last names.
    part = adapter.text_part_name
    taken = _taken_for_experts(adapter)
    parameters = {f"{each.path if part is None else each.name[each.name.index(f'{part}.') :]}.weight" for each in taken}
    for target in adapter.targets:
        if target.num_experts is not None:
            *_, block, experts, kind = target.name.split(".")
            has_gate = target.stacked_as == "w3" or kind == "gate_proj"
            parameters.add(f"{block}.{experts}.{'gate_up_proj' if has_gate else kind}")
    return parameters

"""Stores adapters in the form of PEFT."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...schemas.adapters.adapter_files import PREFIX, name_for_cookbook
from ...schemas.errors import OperationError
from ...schemas.models import GATE_UP_PATTERN, LoraConfig
from ..lora import Adapter, Target
from ..lora.target import parts_of_layers
from .description import CheckpointDescription, few, write_json
from .tensor_files import Place

LAYOUT_VERSION = "0.19.1"
"""The first release of peft that lays out the matrices of experts as we write them for it."""
_KINDS_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


class PeftFormat:
    """Implements CheckpointFormat for adapters."""

    stem, is_read_at_once = "adapter_model", True

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._renamed = [target for target in adapter.targets if target.saved_path is not None]

    def describe(self) -> dict[str, Any]:
        """Returns the adapted layers; the class that the base model's config.json names and the size of its heads, for
        the form in vLLM; the names of a tied head; if experts share matrices, the names of an expert's layers in PEFT's
        files by those in ours; the layout of experts that PEFT adapts together; and layers whose rows are adapted in
        parts, and the numbers of their rows; and the kind of layer that peft refuses."""
        adapter = self._adapter
        described: dict[str, Any] = {"targets": [target.name for target in adapter.targets]}
        of_base = {"architecture": adapter.architecture, "head_features": adapter.head_features}
        described |= {name: value for name, value in of_base.items() if value is not None}
        if adapter.unembed is not None and adapter.tied_embedding is not None:
            described["tied_head"] = {"head": adapter.unembed_name, "embedding": adapter.tied_embedding}
        if adapter.shares_factors:
            sharing = [target for target in adapter.targets if target.shared is not None]
            described["expert_linears"] = {target.stacked_as: target.saved_kind for target in sharing}
        if (experts := adapter.stacked_experts) is not None:
            described["stacked_experts"] = {
                "alternates": experts.alternates,
                "has_gate": experts.has_gate,
                "is_transposed": experts.is_transposed and not experts.is_misread,
                "is_misread": experts.is_misread,
            }
        if fused := _fused_projections(adapter.targets):
            described["fused_projections"] = fused
            whole = {target.part_of: target.whole_features for target in adapter.targets if target.part_of is not None}
            described["fused_outputs"] = whole
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

    def constants(self) -> Mapping[str, Tensor]:
        return {}

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
                for side, place in (("lora_A", (ranks, slice(None))), ("lora_B", (rows, ranks))):
                    of_whole = places.setdefault(f"{PREFIX}{whole}.{side}.weight", {})
                    of_whole[f"{PREFIX}{part.name}.{side}.weight"] = place
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

    def load_constants(self, constants: Mapping[str, Tensor], saved: CheckpointDescription) -> None:
        pass


def _fused_projections(targets: Sequence[Target]) -> dict[str, list[str]]:
    """Returns the linear layers whose rows are adapted in parts, with these parts in order."""
    layers = parts_of_layers(targets)
    return {path.rpartition(".")[2]: [part.kind for part in parts] for path, parts in layers.items()}


def _groups(lora: LoraConfig) -> tuple[bool, bool, bool]:
    return lora.train_attn, lora.train_mlp, lora.train_unembed


def _config(adapter: Adapter, base_name: str) -> dict[str, Any]:
    targets = _PeftTargets.of(adapter)
    return {
        "peft_type": "LORA",
        "peft_version": LAYOUT_VERSION,
        "task_type": adapter.program.peft_task,
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": adapter.lora.rank,
        "lora_alpha": adapter.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "target_modules": sorted(targets.modules),
        **_outside(adapter.text_part_name),
        "modules_to_save": list(adapter.program.peft_modules) or None,
        **({"target_parameters": sorted(targets.parameters)} if targets.parameters else {}),
        **(_double_pairs(adapter) if any(_is_of_gates(target) for target in adapter.targets) else {}),
    }


def _outside(text_part: str | None) -> dict[str, str]:
    """Returns a pattern of layers outside the part for text; encoders of images have some of the same names."""
    return {} if text_part is None else {"exclude_modules": rf"(?!.*\b{text_part}\.|lm_head$).*"}


def _double_pairs(adapter: Adapter) -> dict[str, Any]:
    """Returns rank and alpha for models in which gate and up of an expert are one parameter but have a pair of matrices
    each."""
    rank, alpha = adapter.lora.rank, adapter.lora.alpha
    return {"rank_pattern": {GATE_UP_PATTERN: 2 * rank}, "alpha_pattern": {GATE_UP_PATTERN: 2 * alpha}}


@dataclass(frozen=True)
class _PeftTargets:
    """The names by which peft finds the adapted layers.

    modules: suffixes of the names of linear layers. parameters: suffixes of the names of other parameters.

    In many sparse models peft takes gate_proj, up_proj and down_proj among modules for those of the experts only, and
    drops the matrices of shared experts and dense layers; there the latter are listed as parameters. Not so where files
    have the experts of a layer in one tensor.
    """

    modules: frozenset[str]
    parameters: frozenset[str]

    @staticmethod
    def of(adapter: Adapter) -> "_PeftTargets":
        experts = [target for target in adapter.targets if target.num_experts is not None]
        linears = [target for target in adapter.targets if target.num_experts is None]
        is_misread = adapter.base_is_sparse and adapter.stacked_experts is None
        taken = [target for target in linears if is_misread and _is_like_experts(target)]
        others = {name.rpartition(".")[2] for name in adapter.not_adapted}
        by_path = {target for target in linears if target.kind in others or target.part_of is not None}
        modules = {target.path if target in by_path else target.kind for target in linears if target not in taken}
        # If transformers has a module for each expert, peft finds it by these names.
        modules |= {target.saved_kind for target in experts} if is_misread and not taken else set()
        # exclude_modules is not for parameters, and encoders of images have some of the same last names.
        part = adapter.text_part_name
        paths = {each.path if part is None else each.name[each.name.index(f"{part}.") :] for each in taken}
        parameters = {f"{path}.weight" for path in paths} | {_fused(target) for target in experts}
        return _PeftTargets(frozenset(modules), frozenset(parameters))


def _is_like_experts(target: Target) -> bool:
    return target.kind in _KINDS_OF_EXPERTS and target.part_of is None


def _is_of_gates(target: Target) -> bool:
    return target.kind == "gate_proj" and target.num_experts is not None


def _fused(target: Target) -> str:
    """Returns the suffix of the name of the parameter that holds this layer of all experts."""
    *_, block, experts, kind = target.name.split(".")
    has_gate = target.stacked_as == "w3" or kind == "gate_proj"
    return f"{block}.{experts}.{'gate_up_proj' if has_gate else kind}"

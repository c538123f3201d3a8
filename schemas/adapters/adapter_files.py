"""Rewrites the file with an adapter's matrices into the form that another program reads: peft, vLLM or tinker-cookbook,
which converts and merges the official service's adapters."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..bounds import load_json
from .peft import (
    CONFIG,
    DESCRIPTION,
    FIRST_OF_EXPERTS,
    MATRIX,
    OF_EXPERT,
    PREFIX,
    STACKED,
    WEIGHTS,
    Pair,
    block_diagonal,
    join_experts,
    matrix_names,
    pairs_of,
    stacked_names,
    stacked_places,
)
from .tensor_file import FileTensor, TensorFile, write_tensors
from .vllm_form import VllmForm, form_of

Reader = Literal["peft", "vllm"]

# Models with images of whose text part tinker-cookbook completes the paths.
_TEXT_PART, _COMPLETED_TEXT_PART = "model.", "model.language_model."
_WITH_COMPLETED_PATHS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("Exaone4_5_", "Gemma4", "Glm46V", "Glm4v", "Glm4vMoe", "HyperCLOVAXVisionV2", "KimiK25", "Kimi_K25"),
        *("LightOnOcr", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "VideoLlama3"),
    )
)
# By class of the base model: parts of paths that have another name in its files and in vLLM, the one that the cookbook
# expects. Not so the head of GPT-NeoX, and the text part of Gemma 3 and Mistral 3: peft would drop what has such names.
_PARTS_FOR_COOKBOOK: Mapping[str | None, Mapping[str, str]] = {"HYV3ForCausalLM": {".shared_experts.": ".shared_mlp."}}
# Classes of base models of which the cookbook joins the parts of linear layers itself.
_JOINED_BY_COOKBOOK = frozenset(
    {"NemotronHForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
)


def write_for_cookbook(directory: Path) -> None:
    """Rewrites the adapter in a checkpoint's directory under the names that tinker-cookbook expects.

    These are in most models the names in the model's files. The head is not called unembed_tokens, the official
    service's name for it, which the cookbook would merge into the embedding if the two are tied. Experts whose layers
    have other names in the model's files than gate_proj, up_proj and down_proj stay separate: the cookbook finds them
    under no name. The parts of a linear layer become one pair, except for models of which the cookbook knows the parts.
    Other models stay as they are.
    """
    if not (directory / WEIGHTS).exists():
        return
    description, file = _description(directory), TensorFile(directory / WEIGHTS)
    architecture = description.get("architecture")
    stacks = stacked_places(file)
    replaced = {name for places in stacks.values() for name in places}
    added: dict[str, FileTensor] = {}
    for stack, places in stacks.items():
        added[stack] = FileTensor.stacked([file[name] for name in sorted(places, key=lambda name: places[name])])
    if architecture not in _JOINED_BY_COOKBOOK:
        pairs = pairs_of(file)
        joined = _with_joined_parts(pairs, description)
        replaced |= {name for path in pairs.keys() - joined.keys() for name in matrix_names(path)}
        added |= _tensors_of({path: joined[path] for path in joined if path not in pairs})
    tensors = {name: file.copied(name) for name in file if name not in replaced} | added
    _rewrite(file, {name_for_cookbook(name, architecture): tensor for name, tensor in tensors.items()})


def name_for_cookbook(name: str, architecture: str | None) -> str:
    """Returns the name of a matrix as tinker-cookbook expects it of a base model of this class."""
    if architecture in _WITH_COMPLETED_PATHS:
        return name.replace(f"{PREFIX}{_COMPLETED_TEXT_PART}", f"{PREFIX}{_TEXT_PART}")
    return _renamed(name, _PARTS_FOR_COOKBOOK.get(architecture, {}))


def _path_of_module(path: str, architecture: str | None) -> str:
    """Returns the path that the cookbook expects this one for, or the path unchanged."""
    if architecture in _WITH_COMPLETED_PATHS and not path.startswith(_COMPLETED_TEXT_PART):
        return re.sub(f"^{re.escape(_TEXT_PART)}", _COMPLETED_TEXT_PART, path)
    return _renamed(path, {theirs: ours for ours, theirs in _PARTS_FOR_COOKBOOK.get(architecture, {}).items()})


def _renamed(path: str, names: Mapping[str, str]) -> str:
    for name, other in names.items():
        path = path.replace(name, other)
    return path


def write_for(reader: Reader, directory: Path) -> None:
    """Rewrites the adapter in a checkpoint's directory as the reader reads it. Other models stay as they are.

    Raises ValueError if vLLM does not read it, or its form there is not known.
    """
    if reader == "peft":
        write_for_peft(directory)
    elif any(directory.glob("*.age")):
        raise ValueError("encrypted files cannot be rewritten for vLLM: export them for peft")
    elif (directory / WEIGHTS).exists():
        form = vllm_form_of(directory)
        if (refused := refusal_by_vllm(directory, form)) is not None:
            raise ValueError(f"vLLM {refused}")
        write_for_vllm(directory, form)


def write_for_peft(directory: Path) -> None:
    """Rewrites the adapter in a checkpoint's directory as peft reads it. Other models stay as they are.

    If experts shared matrices, the directory becomes a checkpoint in which each has its own. Files are replaced, so
    that hard links to them keep the former content. Optimizer state stays as it is.
    """
    if (directory / WEIGHTS).exists():
        description, file = _description(directory), TensorFile(directory / WEIGHTS)
        _write_apart(file, _apart(file, description, description.get("stacked_experts")), description)


def write_for_vllm(directory: Path, form: VllmForm) -> None:
    """Rewrites the adapter as vLLM reads it: as `write_for_peft`, with the differences that the form lists."""
    if (directory / WEIGHTS).exists():
        description, file = _description(directory), TensorFile(directory / WEIGHTS)
        joins = form.experts in ("joined", "mixed")
        stacked = description.get("stacked_experts", {"alternates": False}) if joins else None
        pairs = _in_form(_apart(file, description, stacked), form, description.get("head_features"))
        _write_apart(file, pairs, description, has_other_rows=bool(form.halved))
        _drop_unused_patterns(directory)


def _write_apart(
    file: TensorFile, pairs: Mapping[str, Pair], description: dict[str, Any], has_other_rows: bool = False
) -> None:
    """Rewrites the adapter with these pairs, one for each linear layer, and the files next to it accordingly."""
    # Other tensors: such as a critic's head.
    tensors = _tensors_of(pairs) | {name: file.copied(name) for name in file if not MATRIX.fullmatch(name)}
    _rewrite(file, tensors, has_other_rows)
    if fused := description.get("fused_projections"):
        path = file.path.with_name(CONFIG)
        _replace_json(path, _with_fused(load_json(path.read_text()), fused))
    if description.pop("expert_linears", None) is not None:
        description["lora"]["expert_factors"] = "each"
        _replace_json(file.path.with_name(DESCRIPTION), description)


def refusal_by_peft(description: Mapping[str, Any]) -> str | None:
    """Returns what peft lacks for an adapter, None if it takes it. description: content of its trainhouse.json."""
    if (kind := description.get("refused_by_peft")) is None:
        return None
    refused = f"peft refuses adapters of {kind} in {description['base_model']}"
    if description.get("role") != "critic":
        return refused
    return f"{refused}, and vLLM samples no critics: one that peft is to load must be trained with train_attn=False"


def refusal_by_vllm(directory: Path, form: VllmForm) -> str | None:
    """Returns what vLLM lacks for a checkpoint, such as "does not adapt ...", and how to train without that; None if it
    takes the adapter or full model."""
    description = _description(directory)
    if description.get("role") == "critic":
        return "samples no critics"
    if not (directory / WEIGHTS).exists():
        names = (name for file in directory.glob("model*.safetensors") for name in TensorFile(file))
        is_unread = form.unread_full is not None and any(form.unread_full in name for name in names)
        return "does not read the weights of full models of this type: train LoRA" if is_unread else None
    if form.refusal is not None:
        return form.refusal
    if description["lora"]["train_unembed"] and not form.adapts_head:
        return "does not adapt the output head of this model: train adapters with train_unembed=False"
    ignored = ((name, flag) for name in description["targets"] for part, flag in form.ignored.items() if part in name)
    if (found := next(ignored, None)) is not None:
        name, flag = found
        return f"does not adapt layers of this model such as {name}: train adapters with {flag}=False"
    if form.halved and "head_features" not in description:
        return "needs the size of the heads, which this version saves: load the checkpoint and save it again"
    return None


def vllm_form_of(directory: Path) -> VllmForm:
    """Returns the form of a checkpoint's adapter in vLLM. Raises ValueError if the checkpoint does not say of which
    model it is."""
    description = _description(directory)
    if "architecture" not in description:
        raise ValueError(
            f"the checkpoint does not name the class of {description['base_model']}: load it into a model and save it"
            " again with this version"
        )
    return form_of(description["architecture"])


def _apart(file: TensorFile, description: Mapping[str, Any], stacked: Mapping[str, Any] | None) -> dict[str, Pair]:
    """Returns a pair for each linear layer, also of experts.

    Args:
        stacked: says how those of all experts of a layer become one; None leaves each its own.
    """
    architecture = description.get("architecture")
    pairs = {_path_of_module(path, architecture): pair for path, pair in pairs_of(file).items()}
    stacks = [match for path in pairs if (match := STACKED.fullmatch(path)) is not None]
    with_gates = {match["experts"] for match in stacks if match["linear"] == "w3"}
    for match in stacks:
        usual = {stack: name for name, stack in stacked_names(match["experts"] in with_gates).items()}
        linear = (description.get("expert_linears") or usual)[match["linear"]]
        a, b = pairs.pop(match[0])
        for number in range(max(len(a), len(b))):  # one matrix of several experts is shared
            pair = a[min(number, len(a) - 1)], b[min(number, len(b) - 1)]
            pairs[f"{match['experts']}.{number}.{linear}"] = pair
    pairs = _with_joined_parts(pairs, description)
    return pairs if stacked is None else _with_joined_experts(pairs, stacked)


def _with_joined_parts(pairs: Mapping[str, Pair], description: Mapping[str, Any]) -> dict[str, Pair]:
    """Returns the pairs with one for each linear layer in the place of those of its parts."""
    joined = dict(pairs)
    for fused, parts in description.get("fused_projections", {}).items():
        num_outputs = description.get("fused_outputs", {}).get(fused)
        for layer in _with_all(joined, parts):
            of_parts = [joined.pop(f"{layer}{part}") for part in parts]
            joined[f"{layer}{fused}"] = block_diagonal(of_parts, num_outputs)
    return joined


def _with_joined_experts(pairs: Mapping[str, Pair], layout: Mapping[str, bool]) -> dict[str, Pair]:
    """Returns the pairs with those of the experts of a layer joined, gate and up as one.

    Args:
        layout: of their parameters. alternates: whether rows of gate and up take turns. is_misread: whether peft takes
            inputs for outputs.
    """
    joined: dict[str, Pair] = {}
    by_layer: dict[str, dict[int, dict[str, Pair]]] = {}
    for path, pair in pairs.items():
        match = OF_EXPERT.fullmatch(path)
        if match is None:
            joined[path] = pair
        else:
            by_layer.setdefault(match["experts"], {}).setdefault(int(match["number"]), {})[match["linear"]] = pair
    for experts, of_each in by_layer.items():
        first: list[Pair] = []
        for _, linears in sorted(of_each.items()):
            a, b = linears["up_proj"]
            if "gate_proj" in linears:
                a, b = block_diagonal([linears["gate_proj"], (a, b)])
                if layout["alternates"]:
                    b = b.reshape(2, -1, b.shape[1]).swapaxes(0, 1).reshape(b.shape)
            first.append((a, b))
        down = [linears["down_proj"] for _, linears in sorted(of_each.items())]
        for path, of_both in ((f"{experts}.{FIRST_OF_EXPERTS}", first), (experts, down)):
            joined[path] = join_experts([(b.T, a.T) for a, b in of_both] if layout.get("is_misread") else of_both)
    return joined


def _in_form(pairs: Mapping[str, Pair], form: VllmForm, head_features: int | None) -> dict[str, Pair]:
    found: dict[str, Pair] = {}
    for path, (a, b) in pairs.items():
        linear = path.rpartition(".")[2]
        parts, layer = form.split.get(linear, (linear,)), path.removesuffix(linear)
        if linear in form.halved:
            assert head_features is not None, "refusal_by_vllm was asked before"
            # The rows of each head, those of even numbers first.
            b = b.reshape(-1, head_features // 2, 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
        found |= {f"{layer}{part}": (a, own) for part, own in zip(parts, np.split(b, len(parts)), strict=True)}
    for linear, second in form.repeated.items():
        for path in [path for path in found if path.endswith(f".{linear}")]:
            found.setdefault(f"{path.removesuffix(linear)}{second}", found[path])
    return {_renamed(path, form.renamed): pair for path, pair in found.items()}


def _tensors_of(pairs: Mapping[str, Pair]) -> dict[str, FileTensor]:
    return {
        name: FileTensor.of(matrix)
        for path, pair in pairs.items()
        for name, matrix in zip(matrix_names(path), pair, strict=True)
    }


def _rewrite(file: TensorFile, tensors: Mapping[str, FileTensor], has_other_rows: bool = False) -> None:
    if has_other_rows or tensors.keys() != file.keys():
        write_tensors(file.path, tensors, file.metadata)


def _with_fused(config: dict[str, Any], fused: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns the config with fused projections in the place of their parts, whose ranks and alphas they sum."""
    for whole, parts in fused.items():
        for prefix in _with_all(config["target_modules"], parts):
            replaced = {f"{prefix}{part}" for part in parts}
            config["target_modules"] = sorted({*config["target_modules"], f"{prefix}{whole}"} - replaced)
            for pattern, one in (("rank_pattern", config["r"]), ("alpha_pattern", config["lora_alpha"])):
                config[pattern] = {**(config.get(pattern) or {}), whole: len(parts) * one}
    return config


def _drop_unused_patterns(directory: Path) -> None:
    """Drops ranks of linear layers that are not in the file: vLLM takes the largest one for the adapter's."""
    config = load_json((directory / CONFIG).read_text())
    # Patterns name the parameter that the pair adapts.
    paths = [
        path.replace(f".{FIRST_OF_EXPERTS}", ".gate_up_proj") for path in pairs_of(TensorFile(directory / WEIGHTS))
    ]
    patterns = {*(config.get("rank_pattern") or {}), *(config.get("alpha_pattern") or {})}
    unused = {name for name in patterns if not any(re.fullmatch(rf"(.*\.)?({name})", path) for path in paths)}
    if unused:
        for kind in ("rank_pattern", "alpha_pattern"):
            config[kind] = {name: number for name, number in config[kind].items() if name not in unused}
        _replace_json(directory / CONFIG, config)


def _with_all(paths: Collection[str], parts: Sequence[str]) -> list[str]:
    """Returns the starts, with the dot, of paths that exist with each of these last parts."""
    before = [path.removesuffix(parts[0]) for path in paths if path.endswith(parts[0])]
    return [
        prefix
        for prefix in before
        if (not prefix or prefix.endswith(".")) and all(f"{prefix}{part}" in paths for part in parts)
    ]


def _description(directory: Path) -> dict[str, Any]:
    return load_json((directory / DESCRIPTION).read_text())


def _replace_json(path: Path, content: Mapping[str, Any]) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=2) + "\n")
    new.replace(path)

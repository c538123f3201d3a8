"""Rewrites the file with an adapter's matrices into the form that another program reads.

peft and vLLM read pairs of matrices named after the weights that they adapt, those of each expert by themselves, unless
the files of the model have the weights of all experts of a layer as one tensor: then a pair adapts all of them. The
official service's adapters, which tinker-cookbook converts and merges, have the matrices of all experts of a layer as
one tensor: w1 for gate, w2 for down, w3 for up; if experts have no gates, w1 for up.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..bounds import load_json
from .tensor_file import FileTensor, TensorFile, write_tensors
from .vllm_form import VllmForm, form_of

WEIGHTS, CONFIG, DESCRIPTION = "adapter_model.safetensors", "adapter_config.json", "trainhouse.json"
PREFIX = "base_model.model."

_STACKED_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_STACKED_NAMES_WITHOUT_GATES = {"up_proj": "w1", "down_proj": "w2"}
_MATRIX = re.compile(r"(?P<path>.+)\.(?P<side>lora_[AB])\.weight")
_OF_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<linear>\w+)")
_OF_ALL_EXPERTS = re.compile(r"(?P<experts>.+\.experts)\.(?P<linear>w[123])")

Reader = Literal["peft", "vllm"]

Pair = tuple[np.ndarray, np.ndarray]
"""A [rank, in] and B [out, rank], or of all experts of a layer with another first dimension, which is 1 for a matrix
that they share."""

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

# Below a layer's experts, where peft has the pair that adapts the parameter which it wraps first.
_FIRST_OF_EXPERTS = "base_layer"


def write_for_cookbook(directory: Path) -> None:
    """Rewrites the adapter in a checkpoint's directory under the names that tinker-cookbook expects.

    These are in most models the names in the model's files. The head is not called unembed_tokens, the official
    service's name for it, which the cookbook would merge into the embedding if the two are tied. Experts whose layers
    have other names in the model's files than gate_proj, up_proj and down_proj stay separate: the cookbook finds them
    under no name. The parts of a linear layer become one pair, except for models of which the cookbook knows the parts.
    Other models stay as they are.
    """
    if (directory / WEIGHTS).exists():
        description = _description(directory)
        architecture = description.get("architecture")
        file = TensorFile(directory / WEIGHTS)
        tensors = _for_cookbook(file)
        if architecture not in _JOINED_BY_COOKBOOK:
            tensors = _with_joined_parts(tensors, pairs_of(file), description)
        _rewrite(directory, {name_for_cookbook(name, architecture): each for name, each in tensors.items()})


def name_for_cookbook(name: str, architecture: str | None) -> str:
    """Returns the name of a matrix as tinker-cookbook expects it of a base model of this class."""
    if architecture in _WITH_COMPLETED_PATHS:
        return name.replace(f"{PREFIX}{_COMPLETED_TEXT_PART}", f"{PREFIX}{_TEXT_PART}")
    return _renamed(name, _PARTS_FOR_COOKBOOK.get(architecture, {}))


def _path_of_module(path: str, architecture: str | None) -> str:
    """Returns the path for which the cookbook expects this one, or the same if it is no other."""
    if architecture in _WITH_COMPLETED_PATHS and not path.startswith(_COMPLETED_TEXT_PART):
        return re.sub(f"^{re.escape(_TEXT_PART)}", _COMPLETED_TEXT_PART, path)
    return _renamed(path, {theirs: ours for ours, theirs in _PARTS_FOR_COOKBOOK.get(architecture, {}).items()})


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
        description = _description(directory)
        _write_apart(directory, description, description.get("stacked_experts"))


def write_for_vllm(directory: Path, form: VllmForm) -> None:
    """Rewrites the adapter as vLLM reads it: as `write_for_peft`, with the differences that the form lists."""
    if (directory / WEIGHTS).exists():
        description = _description(directory)
        joins = form.experts in ("joined", "mixed")
        stacked = description.get("stacked_experts", {"alternates": False}) if joins else None
        _write_apart(directory, description, stacked, form)
        _drop_unused_patterns(directory)


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


def max_rank(directory: Path) -> int:
    """Returns the largest rank of the adapter's pairs, in any form."""
    config = load_json((directory / CONFIG).read_text())
    return max([config["r"], *(config.get("rank_pattern") or {}).values()])


def _write_apart(
    directory: Path, description: dict[str, Any], stacked: Mapping[str, Any] | None, form: VllmForm | None = None
) -> None:
    """Rewrites the adapter with a pair of matrices for each linear layer.

    Args:
        stacked: says how those of all experts of a layer become one; None leaves each its own.
        form: what else vLLM reads differently; None for peft.
    """
    file = TensorFile(directory / WEIGHTS)
    pairs = _apart(file, description, stacked)
    if form is not None:
        pairs = _in_form(pairs, form, description.get("head_features"))
    _rewrite(directory, _tensors(file, pairs), has_other_rows=form is not None and bool(form.halved))
    if fused := description.get("fused_projections"):
        _replace_json(directory / CONFIG, _with_fused(load_json((directory / CONFIG).read_text()), fused))
    if description.pop("expert_linears", None) is not None:
        description["lora"]["expert_factors"] = "each"
        _replace_json(directory / DESCRIPTION, description)


def block_diagonal(pairs: Sequence[Pair], num_outputs: int | None = None) -> Pair:
    """Returns one pair that adapts a linear layer as these do, each of which adapts the next of its outputs.

    The rank of A [sum of ranks, in] and B [outputs, sum of ranks] is the sum of theirs, so alpha must grow as much for
    the same scale.

    Args:
        num_outputs: of the linear layer, if it has more than these adapt.
    """
    of_a, of_b = zip(*pairs, strict=True)
    num_outputs = num_outputs or sum(len(each) for each in of_b)
    b = np.zeros((num_outputs, sum(each.shape[1] for each in of_b)), np.float32)
    row = column = 0
    for each in of_b:
        b[row : row + each.shape[0], column : column + each.shape[1]] = each
        row, column = row + each.shape[0], column + each.shape[1]
    return np.concatenate(of_a), b


def expert_pairs(a: np.ndarray, b: np.ndarray) -> list[Pair]:
    """Splits the matrices of all experts of a layer, [1 or experts, rank, in] and [1 or experts, out, rank]."""
    number = max(len(a), len(b))
    return [(a[min(index, len(a) - 1)], b[min(index, len(b) - 1)]) for index in range(number)]


def pairs_of(file: TensorFile) -> dict[str, Pair]:
    """Returns the pairs of matrices by the path of what they adapt. Raises ValueError if one of a pair is missing."""
    paths = dict.fromkeys(match["path"] for name in file if (match := _MATRIX.fullmatch(name)))
    pairs = {}
    for path in paths:
        a, b = names = _names(path.removeprefix(PREFIX))
        if missing := [name for name in names if name not in file]:
            raise ValueError(f"{file.path} has no {missing[0]}")
        pairs[path.removeprefix(PREFIX)] = file[a], file[b]
    return pairs


def stacked_names(has_gate: bool) -> Mapping[str, str]:
    """Returns by linear layer of an expert the name of the tensor with the matrices of all experts."""
    return _STACKED_NAMES if has_gate else _STACKED_NAMES_WITHOUT_GATES


def stacked_places(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Returns by name of an expert's matrix the tensor that has those of all experts, and its place there.

    Args:
        names: of all matrices of an adapter; other matrices than of experts are left out.
    """
    matched = ((name, _MATRIX.fullmatch(name)) for name in names)
    of_experts = [
        (name, match["side"], of_expert)
        for name, match in matched
        if match is not None and (of_expert := _OF_EXPERT.fullmatch(match["path"])) is not None
    ]
    with_gates = {of_expert["experts"] for _, _, of_expert in of_experts if of_expert["linear"] == "gate_proj"}
    places: dict[str, tuple[str, int]] = {}
    for name, side, of_expert in of_experts:
        stacked = stacked_names(of_expert["experts"] in with_gates).get(of_expert["linear"])
        if stacked is not None:
            places[name] = f"{of_expert['experts']}.{stacked}.{side}.weight", int(of_expert["number"])
    return places


def _for_cookbook(file: TensorFile) -> dict[str, FileTensor]:
    tensors: dict[str, FileTensor] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    places = stacked_places(file)
    for name in file:
        if (place := places.get(name)) is None:
            tensors[name] = file.copied(name)
        else:
            stacks.setdefault(place[0], {})[place[1]] = file[name]
    for name, matrices in stacks.items():
        tensors[name] = FileTensor.stacked([matrices[number] for number in range(len(matrices))])
    return tensors


def _with_joined_parts(
    tensors: Mapping[str, FileTensor], pairs: Mapping[str, Pair], description: Mapping[str, Any]
) -> dict[str, FileTensor]:
    joined = dict(pairs)
    _join_parts(joined, description)
    parts = {name for path in pairs.keys() - joined.keys() for name in _names(path)}
    added = {path: joined[path] for path in joined if path not in pairs}
    return {name: each for name, each in tensors.items() if name not in parts} | _tensors_of(added)


def _apart(file: TensorFile, description: Mapping[str, Any], stacked: Mapping[str, Any] | None) -> dict[str, Pair]:
    architecture = description.get("architecture")
    pairs = {_path_of_module(path, architecture): pair for path, pair in pairs_of(file).items()}
    stacks = [match for path in pairs if (match := _OF_ALL_EXPERTS.fullmatch(path)) is not None]
    with_gates = {match["experts"] for match in stacks if match["linear"] == "w3"}
    for match in stacks:
        usual = {stacked: name for name, stacked in stacked_names(match["experts"] in with_gates).items()}
        linear = (description.get("expert_linears") or usual)[match["linear"]]
        of_each = enumerate(expert_pairs(*pairs.pop(match[0])))
        pairs |= {f"{match['experts']}.{number}.{linear}": pair for number, pair in of_each}
    _join_parts(pairs, description)
    return pairs if stacked is None else _joined_experts(pairs, stacked)


def _join_parts(pairs: dict[str, Pair], description: Mapping[str, Any]) -> None:
    """Replaces the pairs of the parts of linear layers by one for each layer."""
    for fused, parts in description.get("fused_projections", {}).items():
        num_outputs = description.get("fused_outputs", {}).get(fused)
        for layer in _with_all(pairs, parts):
            of_parts = [pairs.pop(f"{layer}{part}") for part in parts]
            pairs[f"{layer}{fused}"] = block_diagonal(of_parts, num_outputs)


def _tensors(file: TensorFile, pairs: Mapping[str, Pair]) -> dict[str, FileTensor]:
    # Such as a critic's head.
    return _tensors_of(pairs) | {name: file.copied(name) for name in file if not _MATRIX.fullmatch(name)}


def _tensors_of(pairs: Mapping[str, Pair]) -> dict[str, FileTensor]:
    return {
        name: FileTensor.of(matrix)
        for path, pair in pairs.items()
        for name, matrix in zip(_names(path), pair, strict=True)
    }


def _in_form(pairs: Mapping[str, Pair], form: VllmForm, head_features: int | None) -> dict[str, Pair]:
    found: dict[str, Pair] = {}
    for path, (a, b) in pairs.items():
        linear = path.rpartition(".")[2]
        parts, layer = form.split.get(linear, (linear,)), path.removesuffix(linear)
        if linear in form.halved:
            assert head_features is not None, "refusal_by_vllm was asked before"
            b = _halved(b, head_features)
        found |= {f"{layer}{part}": (a, own) for part, own in zip(parts, np.split(b, len(parts)), strict=True)}
    for linear, second in form.repeated.items():
        for path in [path for path in found if path.endswith(f".{linear}")]:
            found.setdefault(f"{path.removesuffix(linear)}{second}", found[path])
    return {_renamed(path, form.renamed): pair for path, pair in found.items()}


def _halved(b: np.ndarray, head_features: int) -> np.ndarray:
    """Returns the rows of each head with those of even numbers first."""
    return b.reshape(-1, head_features // 2, 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape)


def _renamed(path: str, names: Mapping[str, str]) -> str:
    for name, other in names.items():
        path = path.replace(name, other)
    return path


def _joined_experts(pairs: Mapping[str, Pair], layout: Mapping[str, bool]) -> dict[str, Pair]:
    """Returns the pairs with those of the experts of a layer joined, gate and up as one.

    Args:
        layout: of their parameters. alternates: whether rows of gate and up take turns. is_misread: whether peft takes
            inputs for outputs.
    """
    joined: dict[str, Pair] = {}
    by_layer: dict[str, dict[int, dict[str, Pair]]] = {}
    for path, pair in pairs.items():
        match = _OF_EXPERT.fullmatch(path)
        if match is None:
            joined[path] = pair
        else:
            by_layer.setdefault(match["experts"], {}).setdefault(int(match["number"]), {})[match["linear"]] = pair
    for experts, of_each in by_layer.items():
        ordered = [of_each[number] for number in range(len(of_each))]
        first = [_before_activation(each, layout["alternates"]) for each in ordered]
        down = [each["down_proj"] for each in ordered]
        for path, of_both in ((f"{experts}.{_FIRST_OF_EXPERTS}", first), (experts, down)):
            joined[path] = _joined([(b.T, a.T) for a, b in of_both] if layout.get("is_misread") else of_both)
    return joined


def _before_activation(of_expert: Mapping[str, Pair], alternates: bool) -> Pair:
    up, gate = of_expert["up_proj"], of_expert.get("gate_proj")
    return up if gate is None else _gate_and_up(gate, up, alternates)


def _gate_and_up(gate: Pair, up: Pair, alternates: bool) -> Pair:
    a, b = block_diagonal([gate, up])
    return a, b.reshape(2, -1, b.shape[1]).swapaxes(0, 1).reshape(b.shape) if alternates else b


def _joined(of_each: Sequence[Pair]) -> Pair:
    """Returns A [experts * rank, in] and B [out, rank * experts], as `split_experts` splits them."""
    of_a, of_b = zip(*of_each, strict=True)
    b = np.stack(of_b, axis=-1)
    return np.concatenate(of_a), b.reshape(len(b), -1)


def split_experts(pair: Pair, num_experts: int) -> list[Pair]:
    """Splits a pair by which peft adapts a parameter of all experts of a layer into one for each."""
    a, b = pair
    of_b = b.reshape(len(b), -1, num_experts)
    return [(of_a, of_b[:, :, number]) for number, of_a in enumerate(a.reshape(num_experts, -1, a.shape[1]))]


def _names(path: str) -> tuple[str, str]:
    return f"{PREFIX}{path}.lora_A.weight", f"{PREFIX}{path}.lora_B.weight"


def _rewrite(directory: Path, tensors: Mapping[str, FileTensor], has_other_rows: bool = False) -> None:
    file = TensorFile(directory / WEIGHTS)
    if has_other_rows or tensors.keys() != file.keys():
        write_tensors(directory / WEIGHTS, tensors, file.metadata)


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
        path.replace(f".{_FIRST_OF_EXPERTS}", ".gate_up_proj") for path in pairs_of(TensorFile(directory / WEIGHTS))
    ]
    patterns = {*(config.get("rank_pattern") or {}), *(config.get("alpha_pattern") or {})}
    unused = {each for each in patterns if not any(re.fullmatch(rf"(.*\.)?({each})", path) for path in paths)}
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

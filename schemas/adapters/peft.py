"""The rules of peft's files: the names of matrices, how a pair adapts several linear layers or experts, and settings.

peft has a pair of matrices for each linear layer, those of each expert by themselves, unless the files of the model
have the weights of all experts of a layer as one tensor: then a pair adapts all of them. The official service's files
have the matrices of all experts of a layer as one tensor: w1 for gate, w2 for down, w3 for up; if experts have no
gates, w1 for up.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import RequestError
from .tensor_file import TensorFile

WEIGHTS, CONFIG, DESCRIPTION = "adapter_model.safetensors", "adapter_config.json", "trainhouse.json"

LAYOUT_VERSION = "0.19.1"
"""The first release of peft that lays out the matrices of experts as we write them for it."""

PREFIX = "base_model.model."

MATRIX = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])\.weight")

FIRST_OF_EXPERTS = "base_layer"
"""Below a layer's experts, where peft has the pair that adapts the parameter which it wraps first."""

OF_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<linear>\w+)")
"""Paths of a linear layer of an expert."""

OF_ALL_EXPERTS = re.compile(rf"(?P<experts>.+\.experts)(?P<first>\.{FIRST_OF_EXPERTS})?")
"""Paths of the pairs by which peft adapts a parameter of all experts of a layer."""

STACKED = re.compile(r"(?P<experts>.+\.experts)\.(?P<linear>w[123])")
"""Paths of the official service's tensors [experts, ...]; a matrix that experts share is [1, ...]."""

GATE_UP_PATTERN = r".*\.experts\.gate_up_proj"
"""The parameter that has a separate rank and alpha: gate and up of experts, one parameter with two pairs of
matrices."""

_STACKED_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_STACKED_NAMES_WITHOUT_GATES = {"up_proj": "w1", "down_proj": "w2"}

Pair = tuple[np.ndarray, np.ndarray]
"""A [rank, in] and B [out, rank], or of all experts of a layer with another first dimension, which is 1 for a matrix
that they share."""


def matrix_names(path: str) -> tuple[str, str]:
    """Returns the names of the two matrices that adapt a linear layer."""
    return f"{PREFIX}{path}.lora_A.weight", f"{PREFIX}{path}.lora_B.weight"


def pairs_of(file: TensorFile) -> dict[str, Pair]:
    """Returns the pairs of matrices by the path of what they adapt. Raises ValueError if one of a pair is missing."""
    paths = dict.fromkeys(match["path"].removeprefix(PREFIX) for name in file if (match := MATRIX.fullmatch(name)))
    for name in (name for path in paths for name in matrix_names(path)):
        if name not in file:
            raise ValueError(f"{file.path} has no {name}")
    return {path: (file[a], file[b]) for path in paths for a, b in [matrix_names(path)]}


def stacked_names(has_gate: bool) -> Mapping[str, str]:
    """Returns by linear layer of an expert the name of the tensor with the matrices of all experts."""
    return _STACKED_NAMES if has_gate else _STACKED_NAMES_WITHOUT_GATES


def stacked_places(names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Returns the tensors with the matrices of all experts of a layer: by their name, the place of each expert's.

    Args:
        names: of all matrices of an adapter; other matrices than of experts are left out.
    """
    found = [
        (name, side["side"], match)
        for name in names
        if (side := MATRIX.fullmatch(name)) and (match := OF_EXPERT.fullmatch(side["path"]))
    ]
    with_gates = {match["experts"] for _, _, match in found if match["linear"] == "gate_proj"}
    places: dict[str, dict[str, int]] = {}
    for name, side, match in found:
        linear = stacked_names(match["experts"] in with_gates).get(match["linear"])
        if linear is not None:
            stack = f"{match['experts']}.{linear}.lora_{side}.weight"
            places.setdefault(stack, {})[name] = int(match["number"])
    return places


def block_diagonal(pairs: Sequence[Pair], num_outputs: int | None = None) -> Pair:
    """Returns one pair that adapts a linear layer as these do, each of which adapts the next of its outputs.

    The rank of A [sum of ranks, in] and B [outputs, sum of ranks] is the sum of theirs, so alpha must grow as much for
    the same scale.

    Args:
        num_outputs: of the linear layer, if it has more than these adapt.
    """
    b = np.zeros((num_outputs or sum(len(b) for _, b in pairs), sum(len(a) for a, _ in pairs)), np.float32)
    row = column = 0
    for a, part in pairs:
        b[row : row + len(part), column : column + len(a)] = part
        row, column = row + len(part), column + len(a)
    return np.concatenate([a for a, _ in pairs]), b


def join_experts(pairs: Sequence[Pair]) -> Pair:
    """Returns A [experts * rank, in] and B [out, rank * experts], as `split_experts` splits them."""
    b = np.stack([b for _, b in pairs], axis=-1)
    return np.concatenate([a for a, _ in pairs]), b.reshape(len(b), -1)


def split_experts(pair: Pair, num_experts: int) -> list[Pair]:
    """Splits a pair by which peft adapts a parameter of all experts of a layer into one for each."""
    a, b = pair
    of_b = b.reshape(len(b), -1, num_experts)
    return [(of_a, of_b[:, :, number]) for number, of_a in enumerate(a.reshape(num_experts, -1, a.shape[1]))]


_NEUTRAL = frozenset(
    {
        *("peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "lora_alpha", "use_rslora", "lora_dropout", "init_lora_weights"),
        # The weights file shows which layers have matrices.
        *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
        # These only have an effect together with settings that are refused.
        *("megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
    }
)
_REMEDIES = {
    "use_dora": "train without DoRA, or merge it into the base model",
    "bias": 'train with bias="none"',
    "modules_to_save": "train without it: only the LoRA matrices are imported, no whole modules",
    "fan_in_fan_out": "the base models served here have no such layers",
    "rank_pattern": "give all layers the same rank (pad lower ones with rows of zeros)",
    "alpha_pattern": "give all layers the same alpha (scale lora_B by the ratio)",
}
_KEEPING_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that leave the base model unchanged; PiSSA, OLoRA, LoftQ and others change it."""


@dataclass(frozen=True)
class PeftConfig:
    """The supported settings of an adapter."""

    rank: int
    alpha: float
    """Such that the scale is alpha / rank, also for rsLoRA."""
    base_model: str | None
    """The name that it was trained under."""
    peft_version: str | None = None
    """The version of peft that saved it; None if unknown."""
    parameters: tuple[str, ...] = ()
    """Names, or their ends, of the parameters that it adapts in addition to linear layers."""

    @staticmethod
    def read(config: Mapping[str, object]) -> "PeftConfig":
        """Validates a parsed adapter_config.json.

        Settings that change what the adapter computes and that are not supported are refused by name: if they were
        ignored, the same matrices would give other numbers.

        Raises:
            RequestError: a setting is not supported; the message names it and the remedy.
        """
        if config.get("peft_type") != "LORA":
            raise _unsupported_error("peft_type", config.get("peft_type"), "only LORA can be imported")
        if config.get("task_type") not in (None, "CAUSAL_LM"):
            raise _unsupported_error("task_type", config["task_type"], "only CAUSAL_LM can be imported")
        if (init := config.get("init_lora_weights", True)) not in _KEEPING_BASE:
            remedy = "it changes the base model: save with path_initial_model_for_weight_conversion"
            raise _unsupported_error("init_lora_weights", init, f"{remedy}, and set it to true")
        for key, value in config.items():
            if value and key not in _NEUTRAL and (key, value) != ("bias", "none") and not _keeps_scale(key, config):
                raise _unsupported_error(key, value, _REMEDIES.get(key, "not supported: train without it"))
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise _unsupported_error("r", rank, "expected a whole number of at least 1")
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
            raise _unsupported_error("lora_alpha", alpha, "expected a finite number above 0")
        base_model, version = config.get("base_model_name_or_path"), config.get("peft_version")
        if not isinstance(version, str | None):
            raise _unsupported_error("peft_version", version, "expected the release of PEFT that saved it")
        parameters = config.get("target_parameters") or []
        if not isinstance(parameters, list) or not all(isinstance(each, str) for each in parameters):
            raise _unsupported_error("target_parameters", parameters, "expected a list of names")
        # rsLoRA's scale is lora_alpha / sqrt(r).
        scaled = float(alpha) * math.sqrt(rank) if config.get("use_rslora") else float(alpha)
        base_model = base_model if isinstance(base_model, str) else None
        return PeftConfig(rank, scaled, base_model, version, tuple(parameters))


def _keeps_scale(key: str, config: Mapping[str, object]) -> bool:
    """True if patterns give some layers another rank and alpha with the scale of all, as our exports do for layers of
    which parts are adapted separately."""
    # rsLoRA's scale is not the ratio of both.
    if key not in ("rank_pattern", "alpha_pattern") or config.get("use_rslora"):
        return False
    ranks, alphas = config.get("rank_pattern"), config.get("alpha_pattern")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (isinstance(ranks, dict) and isinstance(alphas, dict) and ranks.keys() == alphas.keys()):
        return False
    numbers = [rank, alpha, *ranks.values(), *alphas.values()]
    return all(isinstance(each, int | float) for each in numbers) and all(
        ranks[layer] * alpha == alphas[layer] * rank for layer in ranks
    )


def _unsupported_error(key: str, value: object, remedy: str) -> RequestError:
    shown = repr(value)
    return RequestError(f"adapter_config.json has {key} {shown if len(shown) < 80 else shown[:77] + '...'}: {remedy}")

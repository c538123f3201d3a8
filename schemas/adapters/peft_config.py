"""Reads an adapter_config.json.

Settings that change what the adapter computes and that are not supported are refused by name: if they were ignored, the
same matrices would give other numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import RequestError

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
    """The supported settings of an adapter.

    alpha: such that the scale is alpha / rank, also for rsLoRA.
    base_model: the name it was trained under.
    peft_version: of the peft that saved it, None if it does not say.
    parameters: names, or their ends, of the parameters that it adapts in addition to linear layers.
    """

    rank: int
    alpha: float
    base_model: str | None
    peft_version: str | None = None
    parameters: tuple[str, ...] = ()

    @staticmethod
    def read(config: Mapping[str, object]) -> "PeftConfig":
        """Validates a parsed adapter_config.json.

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

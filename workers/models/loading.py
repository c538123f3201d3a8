"""Loads the modules of a Hugging Face causal LM, and knows how files name them."""

import logging
import platform
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from ..ops.attention import ATTENTION
from ..ops.frozen.quantized import check_installed
from ..parallel.mesh import Mesh
from ..protocol.worker_config import WorkerConfig
from ..resources.devices import no_cuda
from ..shapes.layouts.checks import check_quantization
from ..shapes.model_shape import (
    ModelShape,
    check_weight_files,
    describe_model,
    longest_context,
    read_architecture,
    refusal_of,
)
from ..shapes.other_models import SAME_TYPES, left_out_of, text_settings
from ..shapes.parts import RoutedExperts, Weight
from ..shapes.quantization import quantization_of
from ..shapes.sequence_split import SequenceSplit
from .stored.stored_tensor import dequantizing
from .stored.text_parts import TextModel, text_config_of, transposing_experts
from .tensor_parallel import ParameterSharding

_log = logging.getLogger(__name__)


class LoadedModel:
    """The modules of a base, with this rank's parts of their parameters."""

    def __init__(self, config: WorkerConfig, mesh: Mesh) -> None:
        self.source = config.model.source
        """The place that it was loaded from."""
        check_installed("base_quantization", config.base_quantization, "none", "released")
        check_installed("optimizer_states", config.optimizer_states, "float32")
        self.device = resolve_device(config)
        self.dtype = resolve_dtype(config, self.device)
        self.precision = f"{self.dtype} {config.base_quantization}"
        loaded_config, self._text_part = _config_of(config.model.source)
        self.shape = describe_model(config.model.name, loaded_config.to_dict())
        """The description of its config."""
        self.architecture = read_architecture(config.model)
        """The class that config.json names, None if none."""
        self.sequence_split = SequenceSplit()
        """The split of sequences over ranks along sp."""
        if isinstance(self.shape, ModelShape):
            mesh.spec = self.shape.own_layout(mesh.spec)
            self.sequence_split = self.shape.sequence_split(mesh.spec)
        self.spec = mesh.spec
        """The layout of the ranks that share it."""
        check_quantization(config.base_quantization, mesh.spec, self.shape)
        self._weights = self.shape.placed_weights() if isinstance(self.shape, ModelShape) else {}
        self.placed = ParameterSharding(mesh, self._weights)
        self.splits = self.placed.splits
        self.model = _load(config.model.source, loaded_config, self._text_part, self.dtype, self.device, self.placed)
        self.config: PreTrainedConfig = self.model.config
        self.trunk: nn.Module = self.model.base_model
        """Everything below the unembedding; `lora` wraps its linear layers."""
        self.longest_context = config.max_context_length or self.num_positions
        rotate_alike(self.trunk, self.longest_context)

    @property
    def num_layers(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def num_positions(self) -> int | None:
        """The longest context, or None if the model's config does not say."""
        if isinstance(self.shape, ModelShape):
            return self.shape.max_positions
        config = self.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None)
        return longest_context(longest, self.shape.rope)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids in generation_config.json, or if it has none, in config.json."""
        generation = self.model.generation_config
        ids = generation.eos_token_id if generation is not None else None
        return _ids(getattr(self.config, "eos_token_id", None) if ids is None else ids)

    @property
    def config_eos_token_ids(self) -> tuple[int, ...]:
        """The ids in config.json, or if it has none, in its part about text."""
        configs = (self.config, self.config.get_text_config())
        return next(filter(None, (_ids(getattr(config, "eos_token_id", None)) for config in configs)), ())

    def declared_weight(self, name: str) -> Weight | None:
        """Returns the declaration of the parameter of this name, None if its family declares none."""
        return self._weights.get(name.removeprefix(f"{self.model.base_model_prefix}."))

    def is_replicated_over_tp(self, name: str) -> bool:
        """True if several ranks have the weights of this name whole, and run the same tokens through them."""
        weight = self.declared_weight(name)
        if weight is None or weight.placement is None:
            return False
        return self.spec.tp > self.spec.tp_size_of(weight.placement.unit)

    @property
    def declared_experts(self) -> RoutedExperts | None:
        """The experts as their family declares them; None if there are none, or the type has no family."""
        return self.shape.experts if isinstance(self.shape, ModelShape) else None

    @cached_property
    def stacked_experts(self) -> RoutedExperts | None:
        """The experts whose matrices are in one tensor in files, and so for peft; None if each has its own."""
        experts = self.declared_experts
        if experts is not None and self._text_part is not None and self._text_part.has_transposed_experts:
            return replace(experts, is_transposed=True)
        return experts if experts is not None and self.expert_linears() is None else None

    def expert_linears(self) -> tuple[str, str, str] | None:
        """Returns the names of an expert's gate, up and down in files, or None if one tensor there has all experts."""
        sources = {
            entry.target_patterns[0].rpartition(".")[2]: entry.source_patterns
            for entry in self._conversions
            if isinstance(entry, WeightConverter)
        }
        patterns = [*sources.get("gate_up_proj", ()), *sources.get("down_proj", ())]
        if len(patterns) != 3:
            return None
        gate, up, down = (pattern.removesuffix(".weight").rpartition(".")[2] for pattern in patterns)
        return gate, up, down

    @cached_property
    def _conversions(self) -> Sequence[Any]:
        """The rules of transformers and peft that map the tensors of files to parameters."""
        return get_model_conversion_mapping(self.model)

    @property
    def text_part_name(self) -> str | None:
        """The name of this part for text in transformers' whole model, None if it is all of it."""
        return None if self._text_part is None else self._text_part.name

    def saved_name(self, name: str) -> str:
        """Returns the name of this parameter or module in transformers' whole model."""
        part = self._text_part
        return name if part is None else part.name_in_whole(name, f"{self.model.base_model_prefix}.")

    def name_in_files(self, name: str) -> str:
        """Returns the name that transformers' renaming of files, and so peft's, maps to this linear layer.

        It is the layer's own name unless that would be renamed.
        """
        renamings = [each for each in self._conversions if type(each) is WeightRenaming]
        if _renamed(name, renamings) == name:
            return name
        original = _renamed(name, [each.reverse_transform() for each in reversed(renamings)])
        return original if _renamed(original, renamings) == name else name

    @property
    def saved_buffers(self) -> list[str]:
        """Names of the buffers that are saved with the model, in addition to its parameters."""
        return [
            f"{path}.{name}"
            for path, module in self.model.named_modules()
            for name in module._buffers.keys() - module._non_persistent_buffers_set
        ]


def resolve_device(config: WorkerConfig) -> torch.device:
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise no_cuda(config.device, torch.__version__)
    if config.device == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda" if config.device == "auto" else config.device)
    # Process groups need an index. Among the devices that a rank on Ray sees, its own is the first.
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def unique_name(device: torch.device) -> str:
    """Returns a name that no other device on any machine has."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_properties(device).uuid}"
    machine = Path("/proc/sys/kernel/random/boot_id")
    return f"{device.type} of {machine.read_text().strip() if machine.exists() else platform.node()}"


def resolve_dtype(config: WorkerConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return torch.float32 if config.dtype == "float32" else torch.bfloat16
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def class_of(config: PreTrainedConfig) -> Any:
    """Returns transformers' class that makes the causal model of a config.

    Mistral Small 4 is listed among models of images only, though its class is a causal model.
    """
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def _config_of(source: str) -> tuple[PreTrainedConfig, TextModel | None]:
    """Returns the config of the model to load, and the part that it is, if the model also takes images or sound.

    Raises:
        ValueError: the model is not supported.
    """
    stored, _ = PreTrainedConfig.get_config_dict(source)
    if (same_type := SAME_TYPES.get(str(stored.get("model_type")))) is None:
        config = AutoConfig.from_pretrained(source)
    else:
        config = CONFIG_MAPPING[same_type].from_dict(stored | {"model_type": same_type})
    if (refusal := refusal_of(config.to_dict())) is not None:
        raise ValueError(f"{source}: {refusal}")
    if (left_out := left_out_of(str(config.model_type))) is None:
        return config, None
    _log.info("%s: %s", source, left_out)
    text: Any = text_config_of(config)
    # transformers unties a head that has weights of its own in the files.
    text.tie_word_embeddings = text_settings(config.to_dict()).get("tie_word_embeddings", text.tie_word_embeddings)
    text.quantization_config = dict(quantization_of(config.to_dict()))
    return text, TextModel(str(config.model_type))


def _load(
    source: str,
    config: PreTrainedConfig,
    part: TextModel | None,
    dtype: torch.dtype,
    device: torch.device,
    placed: ParameterSharding,
) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    check_weight_files(source, config.model_type)
    with placed.loading() as options, transposing_experts(part, config), dequantizing(config, dtype):
        loaded: Any = class_of(config).from_pretrained(
            source,
            config=config,
            key_mapping=None if part is None else part.renamings,
            dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            **options,
        )
    model, report = loaded
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise ValueError(
            f"{source}: {len(mismatched)} weights do not fit its config.json, such as {name} of {[*stored]}, which must"
            f" be {[*expected]}: download the model again"
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{source}: {len(missing)} weights are not in its files, such as {missing[0]}: download the model again"
        )
    placed.finish_loading(model)
    model.requires_grad_(False)
    nn.Module.to(model, device)
    return model.eval()


def rotate_alike(trunk: nn.Module, longest: int | None) -> None:
    """Makes our layers and transformers' modules rotate all sequences by the same frequencies: with longrope those for
    the longest context, with dynamic those for the original length times the factor, as vLLM does.

    transformers takes other frequencies for a sequence beyond the original length than for a shorter one. Then keys in
    a cache, tokens of a prefix, and those of shorter sequences in the same pass would rotate otherwise than in a longer
    one. Contexts up to the original length have the module's own. Ding et al., LongRoPE (2024),
    https://arxiv.org/abs/2402.13753.

    Args:
        longest: in tokens; None if it is not known.
    """
    rotary: Any = getattr(trunk, "rotary_emb", None)
    if longest is None:
        return
    match getattr(rotary, "rope_type", None):
        case "longrope":
            if longest > rotary.config.rope_parameters["original_max_position_embeddings"]:
                _rotate_as(rotary, longest)
        case "dynamic":
            original = rotary.config.max_position_embeddings
            if longest > original:
                reach = int(original * rotary.config.rope_parameters["factor"])
                _rotate_as(rotary, reach)
                rotary.max_seq_len_cached = rotary.original_max_seq_len = reach


def _rotate_as(rotary: Any, num_tokens: int) -> None:
    """Sets the frequencies for sequences of this length."""
    frequencies, _ = ROPE_INIT_FUNCTIONS[rotary.rope_type](rotary.config, rotary.inv_freq.device, seq_len=num_tokens)
    for each in (rotary.inv_freq, rotary.original_inv_freq):
        each.copy_(frequencies)


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    key = f"{name}.weight"
    for each in renamings:
        key, _ = each.rename_source_key(key)
    return key.removesuffix(".weight")

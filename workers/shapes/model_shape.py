"""Reads from a model's config.json how its weights can be divided, and how large they are.

Imports neither torch nor transformers, so that an impossible layout is refused before anything is loaded.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..protocol.worker_config import ServedModel
from .families import BY_TRANSFORMERS, FAMILIES, LAYER_TYPES, TEXT_PARTS, Family, unsupported_setting

# The meaning of a config.json without RoPE scaling: rotations depend on the position only.
_NO_SCALING = "default"


@dataclass(frozen=True)
class Rope:
    """The computation of rotations from positions.

    factor, original_positions: None if the kind has none.
    """

    kind: str = _NO_SCALING
    factor: float | None = None
    original_positions: int | None = None

    def __str__(self) -> str:
        if self.kind == _NO_SCALING:
            return "no RoPE scaling"
        factor = "" if self.factor is None else f" by {self.factor:g}"
        original = "" if self.original_positions is None else f" from {self.original_positions}"
        return f"RoPE scaling {self.kind}{factor}{original}"


@dataclass(frozen=True)
class ModelDescription:
    """Properties of a model of any type.

    name: what clients call it. max_positions: its longest context in tokens, None if the config does not say.
    refusal: why it cannot be served, None if it can.
    """

    name: str
    model_type: str
    rope: Rope = field(default_factory=Rope)
    max_positions: int | None = None
    refusal: str | None = None


@dataclass(frozen=True)
class Experts:
    """Feed-forward experts, of which each token uses `per_token`.

    layers: the indices of the layers that have them.
    """

    num: int
    per_token: int
    intermediate: int
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelShape(ModelDescription):
    """Properties of a model of one of FAMILIES.

    heads, kv_heads: of queries, and of keys and values. intermediate: features of a dense feed-forward part.
    attention_bias, output_bias, mlp_bias: whether the projections to queries, keys and values, the projection after
    attention, and those of the feed-forward part have biases.
    window: tokens that a layer with a sliding window sees.
    runs_own_layers: whether its layers are exactly those of the family, so that our own forward pass can run them.
    """

    family: Family
    hidden: int
    intermediate: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    window: int | None
    experts: Experts | None
    runs_own_layers: bool

    @property
    def num_dense_layers(self) -> int:
        """Returns the number of layers without experts."""
        return self.num_layers - (len(self.experts.layers) if self.experts else 0)


def read_model(served: ServedModel) -> ModelDescription:
    """Reads the config.json of a model directory or of the Hugging Face cache, or a config.json given directly.

    Returns a ModelShape if its family is one of FAMILIES.

    Raises:
        ValueError: the file does not exist, or is not the config of a model.
    """
    file = _config_file(served)
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not the config of a model: expected an object")
    return describe_model(served.name, config)


def _config_file(served: ServedModel) -> Path:
    if Path(served.source).is_file():
        return Path(served.source)
    directory = model_directory(served.source)
    if directory is None:
        raise ValueError(
            f"{served.source} is neither a directory nor a model in the cache {_hub_cache()}: download it, or give its "
            f"config.json as --base-model {served.name}=FILE"
        )
    return directory / "config.json"


def refuse_missing_weights(source: str) -> None:
    """Raises ValueError if this is a directory without weights. Anything else may be a model's name on the hub."""
    directory = Path(source)
    if directory.is_dir() and not any(directory.glob("*.safetensors")):
        raise ValueError(f"{source}: no .safetensors weights in this directory")


def model_directory(source: str) -> Path | None:
    """Returns the directory with the model's files, None if they are not on this machine."""
    if Path(source).is_dir():
        return Path(source)
    if source.count("/") > 1 or source.startswith(("/", ".")):
        return None
    # The layout of huggingface_hub, whose import would take half a second.
    repository = _hub_cache() / ("models--" + source.replace("/", "--"))
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    directory = repository / "snapshots" / revision
    return directory if (directory / "config.json").exists() else None


def describe_model(name: str, config: Mapping[str, object]) -> ModelDescription:
    """Returns the model that a config.json describes. Raises ValueError if a number in it is missing or wrong."""
    model_type = type_of(config)
    text = _of_text(config)
    rope, refusal = rope_of(text), refusal_of(config)
    model_type = TEXT_PARTS.get(model_type, model_type)
    family = FAMILIES.get(model_type)
    if family is None or refusal is not None:
        longest = longest_context(_optional(name, text, "max_position_embeddings"), rope)
        return ModelDescription(name, model_type, rope, longest, refusal)
    return _ConfigReader(name, text, family).shape(model_type, rope)


def longest_context(max_positions: int | None, rope: Rope) -> int | None:
    """Returns the longest context in tokens.

    Beyond the original length, the rotations of a longrope sequence would depend on the longest one in its batch. yarn
    supports `factor` times the original length, which a config need not repeat.
    """
    if rope.kind == "longrope":
        return rope.original_positions or max_positions
    if rope.kind == "yarn" and rope.factor and rope.original_positions:
        return max(max_positions or 0, int(rope.factor * rope.original_positions))
    return max_positions


class _ConfigReader:
    """Reads the fields of a config.json, with the family's defaults for missing ones."""

    def __init__(self, name: str, config: Mapping[str, object], family: Family) -> None:
        self._name, self._family = name, family
        self._config = {**family.defaults, **config}

    def shape(self, model_type: str, rope: Rope) -> ModelShape:
        heads = self._number("num_attention_heads")
        hidden, num_layers = self._number("hidden_size"), self._number("num_hidden_layers")
        biased = self._has_bias("attention_bias")
        return ModelShape(
            name=self._name,
            model_type=model_type,
            rope=rope,
            max_positions=longest_context(self._number("max_position_embeddings"), rope),
            family=self._family,
            hidden=hidden,
            intermediate=self._number("intermediate_size"),
            num_layers=num_layers,
            heads=heads,
            kv_heads=self._number("num_key_value_heads", heads),
            head_dim=self._number("head_dim", hidden // heads),
            vocab=self._number("vocab_size"),
            tied_embeddings=self._is("tie_word_embeddings"),
            attention_bias=biased or self._family.qkv_bias,
            output_bias=biased,
            mlp_bias=self._has_bias("mlp_bias"),
            window=self._window(num_layers),
            experts=self._experts(num_layers),
            runs_own_layers=self._is_regular(),
        )

    def _is_regular(self) -> bool:
        rope = self._config.get("rope_parameters")
        in_rope = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
        rotated = self._config.get("partial_rotary_factor") or in_rope or 1.0
        return self._config[self._family.activation_key] == self._family.activation and rotated == 1.0

    def _window(self, num_layers: int) -> int | None:
        if self._config["sliding_window"] is None or not self._is("use_sliding_window"):
            return None
        return self._number("sliding_window") if self._has_windows(num_layers) else None

    def _has_windows(self, num_layers: int) -> bool:
        if self._family.windows != "by_layer":
            return self._family.windows == "every"
        kinds = self._config["layer_types"]
        if isinstance(kinds, list):
            return "sliding_attention" in kinds
        if "sliding_window_pattern" in self._config:
            return self._number("sliding_window_pattern") > 1
        return num_layers > self._number("max_window_layers", at_least=0)

    def _experts(self, num_layers: int) -> Experts | None:
        if self._family.sparsity is None:
            return None
        num = self._number("num_local_experts", self._number("num_experts", at_least=0), at_least=0)
        layers = tuple(range(num_layers)) if self._family.sparsity == "all" else self._sparse_layers(num_layers)
        if not num or not layers:
            return None
        size = "moe_intermediate_size" if "moe_intermediate_size" in self._family.defaults else "intermediate_size"
        return Experts(num, self._number("num_experts_per_tok"), self._number(size), layers)

    def _sparse_layers(self, num_layers: int) -> tuple[int, ...]:
        dense, step = self._config["mlp_only_layers"] or (), self._number("decoder_sparse_step")
        assert isinstance(dense, list | tuple)
        return tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)

    def _has_bias(self, key: str) -> bool:
        return key in self._family.biases and self._is(key)

    def _is(self, key: str) -> bool:
        return bool(self._config[key])

    def _number(self, key: str, if_none: int | None = None, at_least: int = 1) -> int:
        number = _optional(self._name, self._config, key)
        number = if_none if number is None else number
        if number is None or number < at_least:
            raise ValueError(
                f"the config.json of {self._name} has {key} {number}: expected a number of at least {at_least}"
            )
        return number


def _optional(name: str, config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"the config.json of {name} has {key} {value!r}: expected a whole number")


def rope_of(config: Mapping[str, object]) -> Rope:
    """Returns the RoPE scaling of full-attention layers. Accepts the field names of earlier versions of transformers,
    too."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(given, dict):
        given = given.get("full_attention", given)
    if not isinstance(given, dict):
        return Rope()
    kind = str(given.get("rope_type", given.get("type", _NO_SCALING)))
    kind = "longrope" if kind == "su" else kind
    if kind == _NO_SCALING:
        return Rope()
    original = given.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    factor = given.get("factor")
    return Rope(
        kind,
        float(factor) if isinstance(factor, int | float) else None,
        int(original) if isinstance(original, int | float) else None,
    )


def type_of(config: Mapping[str, object]) -> str:
    """Returns the model_type that a config.json names."""
    return str(config.get("model_type", "unknown"))


def _of_text(config: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the config of the text part, if the model is multimodal."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def refusal_of(config: Mapping[str, object]) -> str | None:
    """Returns why a model with this config.json cannot be served, None if it can.

    `plan`, `serve` and the ranks all decide by this. Ranks check the modules and numbers in addition, after loading.
    """
    model_type, every = type_of(config), _of_text(config)
    if (setting := unsupported_setting(model_type, every)) is not None:
        return f"models with {setting} are not supported"
    kinds = every.get("layer_types")
    if isinstance(kinds, list) and (others := sorted(set(map(str, kinds)) - LAYER_TYPES)):
        return f"models with {others[0]} layers are not supported"
    recurrent = [
        key for key in every if key.startswith(("linear_key_", "linear_num_", "linear_conv_", "mamba_", "ssm_"))
    ]
    if recurrent or "full_attention_interval" in every:
        named = recurrent[0] if recurrent else "full_attention_interval"
        return f"models with recurrent or linear-attention layers ({named}) are not supported"
    if every.get("model_type") == "gpt_oss":
        return "models with attention sinks are not supported"
    quantization = every.get("quantization_config")
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "quantized")
        return f"models with {method} weights are not supported: use the release in bfloat16"
    return None if model_type in (*FAMILIES, *TEXT_PARTS, *BY_TRANSFORMERS) else _unknown(model_type, config)


def _unknown(model_type: str, config: Mapping[str, object]) -> str:
    """Returns the message for a type of model that was not checked."""
    if beside := [part for part in ("vision", "audio") if isinstance(config.get(f"{part}_config"), dict)]:
        return (
            f"{model_type} models, which have parts for {' and '.join(beside)}, are not supported: serve a text model"
        )
    return (
        f"{model_type} models are not supported: it was not verified that sequences get the same numbers in a shared"
        " pass as alone; docs/parallel.md lists the models that are served"
    )


def _hub_cache() -> Path:
    """Returns the directory of the Hugging Face cache, as huggingface_hub decides it."""
    home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    cache = os.environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    return Path(os.path.expandvars(os.environ.get("HF_HUB_CACHE", cache))).expanduser()

"""Reads from a model's config.json how its weights can be divided, and how large they are.

Imports neither torch nor transformers, so that an impossible layout is refused before anything is loaded.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, isfinite
from pathlib import Path

from ...schemas.adapters.model_files import hub_cache, model_directory
from ...schemas.adapters.tensor_file import TensorFile
from ...schemas.bounds import load_json
from ..protocol.parallel_spec import ParallelSpec
from ..protocol.worker_config import ServedModel
from .cache_size import CacheSize
from .families import FAMILIES, Family
from .families.config_reader import optional_number
from .other_models import (
    LAYER_TYPES,
    left_out_of,
    refusal_of_type,
    text_defaults,
    text_part_of,
    text_settings,
    text_type_of,
    unsupported_setting,
)
from .packed_weights import ReleasedWeights
from .parts import FLOAT32, Attention, Divisible, Layer, Mixer, RoutedExperts, Weight
from .quantization import MLX, quantization_refusal, refusal_of_mlx
from .sequence_split import SequenceSplit

# The meaning of a config.json without RoPE scaling: rotations depend on the position only.
_NO_SCALING = "default"

# By model_type: names that only its config in transformers reads. Of text all axes of multimodal rotations have the
# same positions.
_OF_QWEN2_VL = {"mrope": _NO_SCALING}
_KINDS_OF_TYPES: Mapping[str, Mapping[str, str]] = {
    "phi3": {"su": "longrope", "yarn": "longrope"},
    "qwen2_5_vl": _OF_QWEN2_VL,
    "qwen2_5_vl_text": _OF_QWEN2_VL,
    "qwen2_vl": _OF_QWEN2_VL,
    "qwen2_vl_text": _OF_QWEN2_VL,
    "sarvam_mla": {"deepseek_yarn": "yarn"},
}

# By the kind of RoPE scaling: what transformers does not compute rotations without.
_LISTS_OF_ROPE = ("short_factor", "long_factor")
_NEEDS_OF_ROPE: Mapping[str, tuple[str, ...]] = {
    _NO_SCALING: (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": _LISTS_OF_ROPE,
    "proportional": (),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class Rope:
    """The computation of rotations from positions.

    factor, original_positions: None if the kind has none. extends: whether the factor extends max_position_embeddings.
    """

    kind: str = _NO_SCALING
    factor: float | None = None
    original_positions: int | None = None
    extends: bool = True

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
    refusal: why it cannot be served, None if it can. released: what its files hold packed. left_out: what is not
    loaded of it, in a sentence; None if all of it is loaded.
    """

    name: str
    model_type: str
    rope: Rope = field(default_factory=Rope)
    max_positions: int | None = None
    refusal: str | None = None
    released: ReleasedWeights = field(default_factory=ReleasedWeights)
    left_out: str | None = None

    def check_context(self, length: int) -> None:
        """Raises ValueError if the model cannot run sequences of so many tokens."""
        longest = self.max_positions
        if longest is not None and length > longest:
            raise ValueError(
                f"max_context_length {length} exceeds the {longest} positions of {self.name} ({self.rope}): at most"
                f" {longest}, unless its config.json names a RoPE scaling that reaches further"
            )


@dataclass(frozen=True, kw_only=True)
class ModelShape(ModelDescription):
    """Properties of a model of one of FAMILIES.

    vocab: tokens of the embedding. runs_own_layers: whether its layers are exactly those of the family, so that our
    own forward pass can run them. embedding_scale: by which the embedding's output is multiplied. other_weights:
    shapes of the parameters outside the layers, the embedding, the head and the last norm, by names below the trunk.
    has_head_bias: whether the output head has a bias. intermediate_size: that of config.json, of which drafts have
    theirs by default.
    """

    family: Family
    hidden: int
    vocab: int
    tied_embeddings: bool
    layers: tuple[Layer, ...]
    runs_own_layers: bool
    embedding_scale: float = 1.0
    other_weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    has_head_bias: bool = False
    intermediate_size: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The different sequence mixers, in the order of their first layers."""
        return tuple(dict.fromkeys(mixer for layer in self.layers for mixer in layer.mixers))

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The different mixers with softmax attention."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, Attention))

    @property
    def heads(self) -> tuple[int, int]:
        """The largest numbers of query and of key/value heads that divide those of all layers with attention."""
        return gcd(*(each.heads for each in self.attentions)), gcd(*(each.kv_heads for each in self.attentions))

    def sequence_split(self, spec: ParallelSpec) -> SequenceSplit:
        """Returns how ranks along sp share out attention."""
        if spec.sp == 1 or not self.attentions:
            return SequenceSplit()
        tp, (heads, kv_heads) = spec.tp_size_of("self_attn"), self.heads
        return SequenceSplit.of(spec.sp, heads // tp, kv_heads // tp)

    @property
    def head_features(self) -> int | None:
        """The features of each head of softmax attention, None if layers differ in that."""
        sizes = {each.head_features for each in self.attentions}
        return sizes.pop() if len(sizes) == 1 else None

    @cached_property
    def attending_layers(self) -> Sequence[int]:
        """The number of the layer to whose keys and values each layer with softmax attention attends."""
        return [
            number if layer.kv_source is None else layer.kv_source
            for number, layer in enumerate(self.layers)
            if any(isinstance(each, Attention) for each in layer.mixers)
        ]

    @cached_property
    def sources(self) -> Sequence[int | None]:
        """The number of the earlier layer whose keys and values, or choice of tokens, each layer uses; None for its
        own."""
        found: list[int | None] = []
        chooser = None
        for number, layer in enumerate(self.layers):
            indexer = None if layer.mixer is None else layer.mixer.indexer
            chooser = number if indexer is not None and not indexer.is_shared else chooser
            found.append(chooser if indexer is not None and indexer.is_shared else layer.kv_source)
        return found

    @cached_property
    def experts(self) -> RoutedExperts | None:
        """The experts of the first sparse layer, None if no layer is sparse."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    @cached_property
    def num_unpacked(self) -> Counter[Weight]:
        """The numbers of layers whose weight of this declaration is not packed, though others of the release are."""
        named = (
            (f"model.layers.{i}.{each.name}", each) for i, layer in enumerate(self.layers) for each in layer.weights()
        )
        return Counter(weight for name, weight in named if self.released.ignores(name))

    def cache_size(self, spec: ParallelSpec, number_bytes: int) -> CacheSize:
        """Returns what a rank's cache holds of a sequence. `number_bytes`: of a number in the base model's dtype."""
        entries = [mixer.cache_entries(spec) for layer in self.layers for mixer in layer.mixers]
        by_layer = [each.numbers_per_token for each in entries if each.numbers_per_token]
        states = sum(number_bytes * each.state_numbers + FLOAT32 * each.float32_state_numbers for each in entries)
        return CacheSize(number_bytes * sum(by_layer), states, sum(by_layer) // max(1, len(by_layer)))

    def divisible(self) -> Sequence[Divisible]:
        """Returns what the layers have that ranks divide evenly."""
        return tuple(dict.fromkeys(each for layer in dict.fromkeys(self.layers) for each in layer.divisible()))

    def own_layout(self, spec: ParallelSpec) -> ParallelSpec:
        """Returns the layout in which ranks have those units whole that tp need not divide, and does not."""
        whole = {each.unit for each in self.divisible() if each.or_whole and each.number % spec.tp}
        return replace(spec, replicated=(*spec.replicated, *sorted(whole.difference(spec.replicated))))

    def placed_weights(self) -> dict[str, Weight]:
        """Returns the parameters of all layers by their names below the trunk."""
        return {f"layers.{i}.{each.name}": each for i, layer in enumerate(self.layers) for each in layer.weights()}


def read_model(served: ServedModel) -> ModelDescription:
    """Reads the config.json of a model directory or of the Hugging Face cache, or a config.json given directly.

    Returns a ModelShape if its family is one of FAMILIES.

    Raises:
        ValueError: the file does not exist, or is not the config of a model.
    """
    return describe_model(served.name, _read_config(served))


def read_architecture(served: ServedModel) -> str | None:
    """Returns the class of transformers that the model's config.json names, None if the file is not here or names
    none."""
    try:
        named = _read_config(served).get("architectures")
    except ValueError:
        return None
    return str(named[0]) if isinstance(named, list) and named else None


def _read_config(served: ServedModel) -> dict[str, object]:
    file = _config_file(served)
    try:
        config = load_json(file.read_text())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not the config of a model: expected an object")
    return config


def _config_file(served: ServedModel) -> Path:
    if Path(served.source).is_file():
        return Path(served.source)
    directory = model_directory(served.source)
    if directory is None:
        raise ValueError(
            f"{served.source} is neither a directory nor a model in the cache {hub_cache()}: download it, or give its "
            f"config.json as --base-model {served.name}=FILE"
        )
    return directory / "config.json"


def check_weight_files(source: str, model_type: str | None = None) -> None:
    """Raises ValueError if this is a directory without weights, or a file of the model is damaged, or one of MLX with
    other numbers than transformers' files, if the type is given. Files of a name on the hub may not be here yet."""
    directory = Path(source) if Path(source).is_dir() else model_directory(source)
    files = sorted(directory.glob("*.safetensors")) if directory else []
    if directory == Path(source) and not files:
        raise ValueError(f"{source}: no .safetensors weights in this directory")
    for file in files:
        refused = None if model_type is None else refusal_of_mlx(model_type)
        try:
            is_of_mlx = TensorFile(file).metadata.get("format") == MLX
        except ValueError as error:
            raise ValueError(f"{error}: download the model again") from None
        if is_of_mlx and refused is not None:
            raise ValueError(f"{file}: {refused}")


def describe_model(name: str, config: Mapping[str, object]) -> ModelDescription:
    """Returns the model that a config.json describes. Raises ValueError if a number in it is missing or wrong."""
    model_type, text, left_out = text_type_of(config), _of_text(config), left_out_of(type_of(config))
    rope, refusal = rope_of(text), refusal_of(config)
    released = ReleasedWeights.of(config) if refusal is None else ReleasedWeights()
    family = FAMILIES.get(model_type)
    if family is None or refusal is not None:
        longest = longest_context(optional_number(name, text, "max_position_embeddings"), rope)
        return ModelDescription(name, model_type, rope, longest, refusal, released, left_out)
    reader = family.reader(name, text, text_defaults(config))
    reader.check_layers()
    try:
        layers = tuple(family.layers(reader))
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(
            f"the config.json of {name} is not that of a {model_type} model: {type(error).__name__}: {error}"
        ) from error
    if (number := optional_number(name, text, "num_hidden_layers")) not in (None, len(layers)):
        raise ValueError(
            f"the config.json of {name} describes {len(layers)} layers, and has num_hidden_layers {number}"
        )
    longest = longest_context(reader.number("max_position_embeddings"), rope)
    if rope.kind == "longrope" and not family.has_long_rotations:
        longest = rope.original_positions or longest
    return ModelShape(
        name=name,
        model_type=model_type,
        rope=rope,
        max_positions=longest,
        released=released,
        left_out=left_out,
        family=family,
        hidden=reader.hidden,
        vocab=reader.number("vocab_size"),
        tied_embeddings=reader.is_set("tie_word_embeddings"),
        layers=layers,
        runs_own_layers=family.describes(reader),
        embedding_scale=family.embedding_scale(reader),
        other_weights=family.other_weights(reader),
        has_head_bias=reader.is_set(family.head_bias_key),
        intermediate_size=reader.optional_number("intermediate_size"),
    )


def longest_context(max_positions: int | None, rope: Rope) -> int | None:
    """Returns the longest context in tokens, as vLLM counts it.

    yarn supports `factor` times the original length, which is max_position_embeddings if the config names no other;
    linear and dynamic, `factor` times max_position_embeddings. With llama3 and longrope that is the whole.
    """
    original = rope.original_positions or max_positions if rope.kind == "yarn" else max_positions
    if original is None or not rope.factor or not rope.extends:
        return max_positions
    return max(max_positions or 0, int(rope.factor * original))


def rope_of(config: Mapping[str, object]) -> Rope:
    """Returns the RoPE scaling of full-attention layers. Accepts the field names of earlier versions of transformers,
    too."""
    of_all = config.get("rope_parameters") or config.get("rope_scaling")
    given = of_all.get("full_attention", of_all) if isinstance(of_all, dict) else of_all
    if not isinstance(given, dict):
        return Rope()
    kind = _kind_of_rope(given, config)
    if kind == "dynamic" and given.get("alpha") and type_of(config).startswith("hunyuan_v1"):
        kind = "ntk_alpha"
    if kind == _NO_SCALING:
        return Rope()
    original = given.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    factor = given.get("factor")
    return Rope(
        kind,
        float(factor) if isinstance(factor, int | float) and isfinite(factor) else None,
        int(original) if isinstance(original, int | float) else None,
        _extends(kind, text_type_of(config), is_of_all_layers=given is of_all),
    )


def _kind_of_rope(given: Mapping[str, object], config: Mapping[str, object]) -> str:
    """Returns the kind that transformers takes this scaling for in a model of this config."""
    kind = str(given.get("rope_type", given.get("type", _NO_SCALING)))
    return _KINDS_OF_TYPES.get(type_of(config), {}).get(kind, kind)


def _refusal_of_rope(config: Mapping[str, object]) -> str | None:
    """Returns why the rotations cannot be computed, those of some layers included; None if they can."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    of_layers = [each for each in given.values() if isinstance(each, dict)] if isinstance(given, dict) else []
    for each in of_layers or ([given] if isinstance(given, dict) else []):
        kind = _kind_of_rope(each, config)
        if kind not in _NEEDS_OF_ROPE:
            return f"models with RoPE scaling {kind} are not supported, only {', '.join(_NEEDS_OF_ROPE)}"
        for key in _NEEDS_OF_ROPE[kind]:
            value = each.get(key)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_ratio = kind == "yarn" and value is None and key in each  # the factor is then that of the lengths
            if not (is_number or is_ratio or (key in _LISTS_OF_ROPE and isinstance(value, list))):
                found = "no" if value is None else f"{value!r} as"
                return f"its config.json has {found} {key} of the RoPE scaling {kind}: take the one of the release"
    return None


def _extends(kind: str, model_type: str, *, is_of_all_layers: bool) -> bool:
    """True if the factor of the scaling extends max_position_embeddings."""
    match kind:
        case "linear" | "proportional":
            return not model_type.startswith("gemma3")  # its max_position_embeddings is the whole
        case "dynamic":
            # Only these are made to rotate all lengths alike (models/loading.py).
            return is_of_all_layers and model_type in FAMILIES
        case _:
            return kind == "yarn"


def type_of(config: Mapping[str, object]) -> str:
    return str(config.get("model_type", "unknown"))


def _of_text(config: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the config of the text part, if the model is multimodal."""
    return {**config, **text_part_of(config), **text_settings(config)}


def refusal_of(config: Mapping[str, object]) -> str | None:
    """Returns why a model with this config.json cannot be served, None if it can.

    `plan`, `serve` and the ranks all decide by this. Ranks check the modules and numbers in addition, after loading.
    """
    if "model_type" not in config:
        return "its config.json names no model_type: give the directory of a release, as transformers saves it"
    if (reason := refusal_of_type(model_type := text_type_of(config))) is not None:
        return reason
    every, family = _of_text(config), FAMILIES.get(model_type)
    setting = unsupported_setting(model_type, every)
    if setting is not None:
        return f"models with {setting} are not supported"
    if (reason := _refusal_of_rope(every)) is not None:
        return reason
    if family is None and (reason := _unknown_layers(every)) is not None:
        return reason
    if family is not None:
        found = family.refused(family.reader(model_type, every, text_defaults(config)))
        if found is not None:
            return f"{model_type} models with {found} are not supported"
    return quantization_refusal(config)


def _unknown_layers(every: Mapping[str, object]) -> str | None:
    """Returns which layers carry a state along the row, or have another form of attention."""
    kinds = every.get("layer_types")
    others = sorted(set(map(str, kinds)) - LAYER_TYPES) if isinstance(kinds, list) else ()
    return f"models with {others[0]} layers are not supported" if others else None

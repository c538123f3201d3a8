"""The declaration of a model family: how to read its layers off a config, and where transformers has its modules.

Imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..parts import Dense, Layer, Mamba, OutputGate, QueryGrowth, SoftmaxAttention
from .config_reader import ConfigReader

# The value of a field of a part.
Setting = bool | str | float | tuple[str, str] | QueryGrowth | OutputGate | None

# Rotations that do not depend on the lengths in a batch; with "dynamic" and "longrope" once a model is loaded
# (models/loading.py).
FIXED_ROTATIONS = frozenset({"default", "dynamic", "linear", "llama3", "longrope", "ntk_alpha", "proportional", "yarn"})

# Fields that a config.json may leave out.
DEFAULTS: Mapping[str, object] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": None,
    "num_key_value_heads": None,
    "sliding_window": None,
    "use_sliding_window": True,
}

# Fields that transformers ignores in types whose config class does not declare them.
_FIELDS_OF_SOME = frozenset({"first_k_dense_replace", "mlp_layer_types", "use_sliding_window"})


@dataclass(frozen=True)
class Family:
    """Models of one `model_type` that run with our own layers (workers/models/fused_decoder.py).

    name: the prefix of its classes in transformers. module: the module of transformers that defines them.
    layers: reads the layers off a config.
    defaults: values of fields that a config.json may leave out and transformers' config class does not declare. Heads
    rotate in part, by `partial_rotary_factor`, only if it is listed.
    aliases: other names of fields.
    unsupported: names what a model with this config has that the layers do not run, None if nothing.
    trunk, rotary: suffixes of the classes of the model without its head, and of its rotations.
    embedding: the same of its embedding; None = torch's embedding. layer: the same of its layers.
    norm: the suffix of the class of its norms; None = torch's LayerNorm.
    head_bias_key: the config's field that says whether the output head has a bias; "" if none ever has.
    last_norm, embedding_name: the names of the norm after all layers, and of the embedding.
    embedding_scale_key: the config's field for a factor of the embedding's output. embedding_root_key: the one by which
    the root of the hidden size is such a factor.
    centers_norms: whether norms subtract the mean, as layer norms do.
    norm_weight_plus_one: whether 1 is added to the weights of norms.
    settings: those of REFUSED_SETTINGS that the layers implement.
    activation, activation_key: the activation of gates, and the config's field for it. activation_aliases: other names
    in config.json that transformers reads as this activation.
    other_weights: reads the shapes of the trunk's parameters outside the layers, the embedding and the last norm.
    logit_scale_key, logit_divisor_key, logit_cap_key: the config's fields by which logits are multiplied, or divided,
    and for the largest absolute value that they approach. "" for none.
    refused_by_peft: the kind of linear layer that peft does not adapt in this type, None if it adapts all.
    has_long_rotations: whether transformers takes the factors of "longrope" for long sequences.
    unknown_settings: settings whose arithmetic the layers do not have. A model with one runs by transformers' modules.
    """

    name: str
    module: str
    layers: Callable[[ConfigReader], Sequence[Layer]]
    defaults: Mapping[str, object] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    unsupported: Callable[[ConfigReader], str | None] = lambda config: None
    trunk: str = "Model"
    rotary: str = "RotaryEmbedding"
    embedding: str | None = None
    layer: str = "DecoderLayer"
    norm: str | None = "RMSNorm"
    head_bias_key: str = ""
    last_norm: str = "norm"
    embedding_name: str = "embed_tokens"
    embedding_scale_key: str = ""
    embedding_root_key: str = ""
    centers_norms: bool = False
    norm_weight_plus_one: bool = False
    settings: tuple[str, ...] = ()
    activation: str = "silu"
    activation_key: str = "hidden_act"
    activation_aliases: tuple[str, ...] = ()
    logit_scale_key: str = ""
    logit_divisor_key: str = ""
    logit_cap_key: str = ""
    refused_by_peft: str | None = None
    has_long_rotations: bool = True
    unknown_settings: tuple[str, ...] = ()
    other_weights: Callable[[ConfigReader], Mapping[str, tuple[int, ...]]] = lambda config: {}

    @property
    def implemented(self) -> frozenset[str]:
        """Those of REFUSED_SETTINGS that a model of this family may have."""
        return frozenset((*self.settings, self.logit_scale_key, self.logit_divisor_key, self.logit_cap_key))

    def defines(self, module: object, role: str) -> bool:
        """True if the module is of the family's class for this role, such as "Attention"."""
        kind, home = type(module), f"transformers.models.{self.module}.modeling_{self.module}"
        return kind.__name__ == self.name + role and kind.__module__ == home

    def is_norm(self, module: object, ending: str | None = None) -> bool:
        """True if the module is of the class of the family's norms, or of that with another ending."""
        ending = ending or self.norm
        if ending is not None:
            return self.defines(module, ending)
        return (type(module).__module__, type(module).__name__) == ("torch.nn.modules.normalization", "LayerNorm")

    def describes(self, config: ConfigReader) -> bool:
        """True if a model with this config has the arithmetic of our layers."""
        is_known = not any(config.is_set(setting) for setting in self.unknown_settings)
        return is_known and config.get(self.activation_key) in (self.activation, *self.activation_aliases)

    def embedding_scale(self, config: ConfigReader) -> float:
        """Returns the factor of the embedding's output."""
        root = config.hidden**0.5 if config.is_set(self.embedding_root_key) else 1.0
        return root * config.fraction(self.embedding_scale_key, 1.0)

    @property
    def unlike(self) -> str:
        """Names what a model may have for which `describes` is false."""
        return " or ".join((f"another activation than {self.activation}", *self.unknown_settings))

    def with_defaults(self, fields: Mapping[str, object]) -> "Family":
        """Returns the family with these values for fields that a config.json may leave out, where it has none."""
        return replace(self, defaults={**self._renamed(fields), **self.defaults})

    def _renamed(self, fields: Mapping[str, object]) -> Mapping[str, object]:
        return {self.aliases.get(name, name): value for name, value in fields.items()}

    def reader(
        self, name: str, config: Mapping[str, object], defaults: Mapping[str, object] | None = None
    ) -> ConfigReader:
        """Raises ValueError if a field has different values under different names.

        Args:
            defaults: values of fields that this config may leave out, instead of the family's.
        """
        known = {key: value for key, value in config.items() if key not in _FIELDS_OF_SOME or key in self.defaults}
        for alias, key in self.aliases.items():
            value, other = config.get(alias), config.get(key)
            if None not in (value, other) and value != other:
                both = f"{alias} {value} and {key} {other}"
                raise ValueError(f"the config.json of {name} has {both}, which are two names of one field")
            known |= {} if value is None else {key: value}
        return ConfigReader(name, known, {**DEFAULTS, **self.defaults, **self._renamed(defaults or {})})

    def refused(self, config: ConfigReader) -> str | None:
        """Names what a model with this config has for which it is refused, None if it can be served."""
        if "sliding_attention" in (config.names("layer_types") or ()) and config.window is None:
            return "layers of sliding_attention and no sliding_window"
        if "partial_rotary_factor" not in self.defaults and config.rotary_factor != 1:
            return f"partial_rotary_factor {config.rotary_factor:g}"
        return self.unsupported(config)


def kinds_by_step(config: ConfigReader, step: int) -> Sequence[str]:
    """Returns kinds of layers as `layer_types` names them: every step-th layer sees all tokens, others a window."""
    return ["sliding_attention" if number % step else "full_attention" for number in range(1, config.num_layers + 1)]


def attention(config: ConfigReader, bias_key: str = "", **settings: Setting) -> SoftmaxAttention:
    """Returns attention of the sizes that most configs name alike. Settings are fields of SoftmaxAttention.

    Args:
        bias_key: the config's field that says whether all its projections have biases; "" if none has.
    """
    head_dim, has_bias = config.head_dim, config.is_set(bias_key)
    sizes: dict[str, Setting] = {"heads": config.heads, "rotary_dim": int(head_dim * config.rotary_factor)}
    sizes |= {"qkv_bias": has_bias, "output_bias": has_bias}
    return SoftmaxAttention(
        hidden=config.hidden,
        kv_heads=config.number("num_key_value_heads", config.heads),
        head_dim=head_dim,
        **(sizes | settings),  # pyright: ignore[reportArgumentType]
    )


def any_set(*keys: str) -> Callable[[ConfigReader], str | None]:
    """Returns a function that names the first of these fields that a config sets."""
    return lambda config: next((key for key in keys if config.is_set(key)), None)


def heads_unlike_hidden(config: ConfigReader) -> str | None:
    """Names the sizes of attention whose heads do not make up the hidden size, None if they do."""
    if None in (config.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim")):
        return None
    is_alike = config.heads * config.head_dim == config.hidden
    return None if is_alike else f"{config.heads} heads of {config.head_dim} features and hidden_size {config.hidden}"


def query_growth(config: ConfigReader) -> QueryGrowth | None:
    """Returns how the queries of Ministral 3 and Mistral Small 4 grow with their positions."""
    rate, length = config.fraction("llama_4_scaling_beta", 0.0), config.fraction("original_max_position_embeddings", 0)
    return QueryGrowth(rate, int(length)) if rate and length else None


def dense(config: ConfigReader, **settings: bool | str | float | tuple[str, ...]) -> Dense:
    """Returns the dense part of the size that most configs name alike. Settings are fields of Dense."""
    features = config.number("intermediate_size")
    return Dense(hidden=config.hidden, features=features, **settings)  # pyright: ignore[reportArgumentType]


def mamba(config: ConfigReader, features: int, **settings: bool | str | tuple[float, ...]) -> Mamba:
    """Returns Mamba-2 of the sizes that most configs name alike. Settings are fields of Mamba.

    Args:
        features: of all heads together.
    """
    heads = config.number("mamba_n_heads")
    return Mamba(
        hidden=config.hidden,
        heads=heads,
        groups=config.number("mamba_n_groups"),
        head_dim=features // heads,
        state_dim=config.number("mamba_d_state"),
        kernel=config.number("mamba_d_conv"),
        conv_bias=config.is_set("mamba_conv_bias"),
        bias=config.is_set("mamba_proj_bias"),
        **settings,  # pyright: ignore[reportArgumentType]
    )

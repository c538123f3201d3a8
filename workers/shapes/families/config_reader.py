"""Reads fields of a model's config.json, with the family's defaults for missing ones. Imports no torch."""

from collections.abc import Mapping, Sequence

_LARGEST, _MOST_LAYERS = 1 << 31, 4096

# Kinds of layers that some family has, under the names of all versions of transformers.
_LAYER_TYPES = {
    *("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "indexed_attention"),
    *("attention", "mamba", "hybrid", "mlp", "moe"),
}


class ConfigReader:
    """Holds the config of one model. name: what clients call it, for messages."""

    def __init__(self, name: str, config: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        self._name = name
        self._config = {**defaults, **config}

    def get(self, key: str) -> object:
        """Returns the value of any type, None if there is none."""
        return self._config.get(key)

    def is_set(self, key: str) -> bool:
        return bool(self._config.get(key))

    def number(self, key: str, if_none: int | None = None, at_least: int = 1, at_most: int = _LARGEST) -> int:
        """Returns a whole number. Raises ValueError if it is missing, of another type, too small or too large."""
        number = self.optional_number(key)
        number = if_none if number is None else number
        if number is None or number < at_least:
            raise ValueError(
                f"the config.json of {self._name} has {key} {number}: expected a number of at least {at_least}"
            )
        if number > at_most:
            raise ValueError(f"the config.json of {self._name} has {key} {number}: expected at most {at_most}")
        return number

    def optional_number(self, key: str) -> int | None:
        """Returns a whole number, None if there is none. Raises ValueError if it is of another type."""
        return optional_number(self._name, self._config, key)

    @property
    def rope(self) -> Mapping[str, object]:
        """Settings of rotations, also under the name of earlier versions of transformers."""
        rope = self._config.get("rope_parameters") or self._config.get("rope_scaling")
        return rope if isinstance(rope, dict) else {}

    def fraction(self, key: str, if_none: float) -> float:
        """Returns a number that the config has among its rope_parameters, or itself."""
        value = self.rope.get(key) or self._config.get(key) or if_none
        if not isinstance(value, int | float):
            raise ValueError(f"the config.json of {self._name} has {key} {value!r}: expected a number")
        return float(value)

    def limit(self, key: str) -> float | None:
        """Returns a positive number, None if there is none. Raises ValueError if it is something else."""
        value = self._config.get(key)
        if value is None or (isinstance(value, int | float) and value > 0):
            return None if value is None else float(value)
        raise ValueError(f"the config.json of {self._name} has {key} {value!r}: expected a positive number")

    def fractions(self, key: str, count: int) -> tuple[float, ...]:
        """Returns a list of so many numbers, ones if there is none. Raises ValueError if it is of another length."""
        value = self._config.get(key) or [1.0] * count
        if not isinstance(value, list | tuple) or len(value) != count:
            raise ValueError(f"the config.json of {self._name} has {key} {value!r}: expected {count} numbers")
        return tuple(map(float, value))

    def names(self, key: str) -> Sequence[str] | None:
        """Returns a list of names, such as one for each layer; None if there is none."""
        value = self._config.get(key)
        return [str(each) for each in value] if isinstance(value, list | tuple) else None

    def check_layers(self) -> None:
        """Raises ValueError if `layer_types` names a kind that no family has, or not one for each layer."""
        kinds = self.names("layer_types")
        if kinds is None:
            return
        if unknown := sorted(set(kinds) - _LAYER_TYPES):
            raise ValueError(f"the config.json of {self._name} has layer_types with {unknown[0]!r}, which is not known")
        if len(kinds) != self.num_layers:
            raise ValueError(
                f"the config.json of {self._name} has {len(kinds)} layer_types and num_hidden_layers {self.num_layers}:"
                " expected one for each layer"
            )

    def numbers(self, key: str) -> Sequence[int]:
        """Returns a list of whole numbers, empty if there is none."""
        value = self._config.get(key)
        return [each for each in value if isinstance(each, int)] if isinstance(value, list | tuple) else ()

    def of_layer(self, number: int) -> "ConfigReader":
        """Returns the config of one layer, where `per_layer_config` has settings of its own for it."""
        of_layers = self._config.get("per_layer_config")
        own = {int(key): value for key, value in of_layers.items()} if isinstance(of_layers, dict) else {}
        return self.changed(own.get(number, {}))

    def changed(self, settings: Mapping[str, object]) -> "ConfigReader":
        return ConfigReader(self._name, settings, self._config)

    @property
    def num_layers(self) -> int:
        return self.number("num_hidden_layers", at_most=_MOST_LAYERS)

    @property
    def hidden(self) -> int:
        return self.number("hidden_size")

    @property
    def heads(self) -> int:
        return self.number("num_attention_heads")

    @property
    def head_dim(self) -> int:
        return self.number("head_dim", self.hidden // self.heads)

    @property
    def rotary_factor(self) -> float:
        """The part of a head's features that rotates."""
        return self.fraction("partial_rotary_factor", 1.0)

    @property
    def window(self) -> int | None:
        """The tokens that a layer with a sliding window sees; None if no layer has one."""
        is_used = self._config.get("sliding_window") is not None and self.is_set("use_sliding_window")
        return self.number("sliding_window") if is_used else None


def optional_number(name: str, config: Mapping[str, object], key: str) -> int | None:
    """Returns a whole number of a config.json, None if it is missing. Raises ValueError if it is something else."""
    value = config.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"the config.json of {name} has {key} {value!r}: expected a whole number")

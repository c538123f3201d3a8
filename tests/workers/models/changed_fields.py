"""Configs of tiny models of each family in which one field that the family reads has another value."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest
from trainhouse.workers.shapes.families.config_reader import ConfigReader
from trainhouse.workers.shapes.model_shape import describe_model
from transformers import AutoConfig

from .tiny_types import tiny_settings_of

# Values of fields that are not set, or of lists. All types have them at most once.
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (True, False),
    "first_k_dense_replace": (0, 1, 2),
    "head_dim": (16,),
    "index_topk_pattern": ("FF",),
    "layer_types": (["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]),
    "layers_block_type": (["mlp", "full_attention", "moe", "linear_attention"],),
    "mamba_conv_bias": (True, False),
    "mamba_d_conv": (3,),
    "mamba_n_groups": (4,),
    "mlp_layer_types": (["dense", "sparse"], ["sparse", "dense"]),
    "mlp_only_layers": ([0],),
    "moe_latent_size": (None,),
    "moe_layers": ([1],),
    "no_rope_layers": ([1, 0], [0, 1]),
    "num_attention_heads_per_layer": ([2, 4],),
    "num_experts": (2, 8),
    "num_key_value_heads": (2, 4),
    "num_local_experts": (2, 8),
    "partial_rotary_factor": (0.5,),
    "q_lora_rank": (None, 24),
    "rope_interleave": (True, False),
    "rotary_dim": (4,),
    "shared_intermediate_size": (24,),
    "sliding_window": (None, 3),
    "use_sliding_window": (True, False),
}


def changed_settings(model_type: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each field that the family reads, or of an alias, and settings in which it has another value.

    Settings are given once with lists for all layers, and once without the lists that transformers derives from other
    fields.
    """
    whole = tiny_settings_of(model_type)
    kind = type(AutoConfig.for_model(model_type))
    plain = {name: value for name, value in whole.items() if not isinstance(value, list)}
    for given in (whole, plain) if plain != whole else (whole,):
        known = AutoConfig.for_model(model_type, **given).to_dict()
        fields = _fields_read(model_type, given)
        aliases = {alias: target for alias, target in kind.attribute_map.items() if fields & {alias, target}}
        for name in sorted(fields | aliases.keys()):
            field = aliases.get(name, name)
            rest = {key: each for key, each in given.items() if aliases.get(key, key) != field}
            yield from ((name, deepcopy(rest) | {name: each}) for each in _other_values(name, known.get(field)))


def _fields_read(model_type: str, given: Mapping[str, Any]) -> set[str]:
    """Returns the fields of a config.json that the family reads. All read `rope_parameters`, and it has other ones."""
    read: set[str] = set()
    made = ConfigReader.__init__

    class Recorded(dict[str, object]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

    def recording(reader: ConfigReader, *of_model: Any) -> None:
        made(reader, *of_model)
        reader._config = Recorded(reader._config)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ConfigReader, "__init__", recording)
        describe_model("m", {"model_type": model_type, **given})
    return read - {"", "rope_parameters", "rope_scaling", "per_layer_config"}


def _other_values(name: str, value: Any) -> list[Any]:
    """Returns values of a field that are not this one."""
    found = list(_VALUES.get(name, ()))
    if isinstance(value, bool):
        found.append(not value)
    elif isinstance(value, int | float) and value:
        found += [2 * value] if value == 1 else [2 * value, value // 2 if isinstance(value, int) else value / 2]
    elif isinstance(value, str):
        found.append("relu")
    return [each for each in found if each != value]

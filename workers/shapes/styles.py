"""Sharding styles: how ranks divide the weights of a model's layers along tp and ep, and the user's overrides.

Imports no torch.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ..protocol.parallel_spec import ShardedUnit

Style = Literal["colwise", "rowwise", "grouped", "replicate"]


@dataclass(frozen=True)
class Placement:
    """The division of a parameter along `dim` by tp.

    num_sections: equal parts of the dimension that are divided separately (see Split).
    of_heads: whether its rows are queries, keys and values, divided separately.
    Parameters of experts have one row for each expert in addition, and these rows are divided along ep.
    """

    unit: ShardedUnit
    dim: int
    num_sections: int = 1
    of_heads: bool = False

    @property
    def style(self) -> Style:
        if self.unit == "experts":
            return "grouped"
        return "colwise" if self.dim == 0 else "rowwise"

    def sections(self, size: int, heads: int, kv_heads: int) -> tuple[int, ...]:
        """Returns the sections of a dimension of this size."""
        shares = (heads, kv_heads, kv_heads) if self.of_heads else (1,) * self.num_sections
        return tuple(size * share // sum(shares) for share in shares)


# Placements by name below the trunk. Every rank has all other parameters whole.
PLAN: Mapping[str, Placement] = {
    "layers.*.self_attn.q_proj.weight": Placement("self_attn", 0),
    "layers.*.self_attn.q_proj.bias": Placement("self_attn", 0),
    "layers.*.self_attn.k_proj.weight": Placement("self_attn", 0),
    "layers.*.self_attn.k_proj.bias": Placement("self_attn", 0),
    "layers.*.self_attn.v_proj.weight": Placement("self_attn", 0),
    "layers.*.self_attn.v_proj.bias": Placement("self_attn", 0),
    "layers.*.self_attn.qkv_proj.weight": Placement("self_attn", 0, of_heads=True),
    "layers.*.self_attn.o_proj.weight": Placement("self_attn", 1),
    "layers.*.mlp.gate_proj.weight": Placement("mlp", 0),
    "layers.*.mlp.gate_proj.bias": Placement("mlp", 0),
    "layers.*.mlp.up_proj.weight": Placement("mlp", 0),
    "layers.*.mlp.up_proj.bias": Placement("mlp", 0),
    "layers.*.mlp.gate_up_proj.weight": Placement("mlp", 0, 2),
    "layers.*.mlp.down_proj.weight": Placement("mlp", 1),
    "layers.*.mlp.experts.gate_up_proj": Placement("experts", 1, 2),
    "layers.*.mlp.experts.down_proj": Placement("experts", 2),
}

# A pattern for all parameters of a unit.
PATTERNS: Mapping[ShardedUnit, str] = {
    "self_attn": "layers.*.self_attn.*",
    "mlp": "layers.*.mlp.*_proj.*",
    "experts": "layers.*.mlp.experts.*",
}


def placement_of(name: str) -> Placement | None:
    """Returns the placement of a parameter, given its name below the trunk, with * or a number for the layer."""
    return next((place for pattern, place in PLAN.items() if fnmatchcase(name, pattern)), None)


def replicated_units(overrides: Iterable[str]) -> tuple[ShardedUnit, ...]:
    """Returns the units that every rank holds whole, by overrides of the form PATTERN=STYLE; the last one counts.

    Patterns match names as `trainhouse plan` shows them. Raises ValueError if an override is wrong.
    """
    styles: dict[ShardedUnit, Style] = {}
    for override in overrides:
        pattern, _, style = (word.strip() for word in override.rpartition("="))
        found = [name for name in PLAN if _names(pattern, name)]
        _check_override(override, pattern, style, found)
        for name in found:
            styles[PLAN[name].unit] = "replicate" if style == "replicate" else PLAN[name].style
    return tuple(unit for unit in PATTERNS if styles.get(unit) == "replicate")


def _names(pattern: str, name: str) -> bool:
    """True if the pattern matches a parameter or its layer, with or without the prefix of the trunk."""
    layer = name.removesuffix(".weight").removesuffix(".bias")
    return any(fnmatchcase(each, pattern) for each in (name, layer, f"model.{name}", f"model.{layer}"))


def _check_override(override: str, pattern: str, style: str, found: Sequence[str]) -> None:
    if not pattern or not style:
        raise ValueError(f"{override!r} is not PATTERN=STYLE, such as {PATTERNS['self_attn']}=replicate")
    every = re.sub(r"[0-9]+", "*", pattern)
    if not found and any(_names(every, name) for name in PLAN):
        raise ValueError(f"{pattern} names one layer, but a style applies to all layers: use {every}={style}")
    if not found:
        raise ValueError(
            f"{pattern} matches no weights that ranks divide; those are {', '.join(PATTERNS.values())} (trainhouse "
            "plan shows all)"
        )
    if style != "replicate":
        _check_style(pattern, style, found)
        return
    units: set[ShardedUnit] = {PLAN[name].unit for name in found}
    for unit in sorted(units):
        whole = [name for name in PLAN if PLAN[name].unit == unit]
        if missing := [name for name in whole if name not in found]:
            # Every model has the rowwise ones, but not all of the others.
            known = max(missing, key=lambda name: PLAN[name].dim)
            raise ValueError(
                f"{pattern} leaves out {known}, which must have the same style as {found[0]}: use "
                f"{PATTERNS[unit]}=replicate"
            )


def _check_style(pattern: str, style: str, found: Sequence[str]) -> None:
    for name in found:
        if PLAN[name].style != style:
            raise ValueError(f"{pattern}={style}: {name} must be {PLAN[name].style} or replicate")

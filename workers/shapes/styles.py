"""Sharding styles: how ranks divide the weights of a model's layers along tp and ep, and the user's overrides.

Imports no torch.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from ..protocol.parallel_spec import ShardedUnit
from .parts import PARTS, Placement
from .parts.part import Style

# Placements by name below the trunk. Every rank has all other parameters whole.
PLAN: Mapping[str, Placement] = {
    f"layers.*.{name}": placement
    for part in PARTS
    for name, placement in part.placements.items()
    if placement.dim is not None and placement.is_gathered
}

# A pattern for all parameters of a unit.
PATTERNS: Mapping[ShardedUnit, str] = {
    "self_attn": "layers.*.self_attn.*",
    "linear_attn": "layers.*.linear_attn.*",
    "mamba": "layers.*.mamba.*",
    "mlp": "layers.*.mlp.*_proj.*",
    "experts": "layers.*.mlp.experts.*",
}

# Experts of some families are below blocks with other names.
_OF_OTHER_BLOCKS = re.compile(r"\b(mixer|block_sparse_moe)\.experts")


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
    pattern = _OF_OTHER_BLOCKS.sub("mlp.experts", pattern)
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
            known = max(missing, key=lambda name: PLAN[name].dim or 0)
            raise ValueError(
                f"{pattern} leaves out {known}, which must have the same style as {found[0]}: use "
                f"{PATTERNS[unit]}=replicate"
            )


def _check_style(pattern: str, style: str, found: Sequence[str]) -> None:
    for name in found:
        if PLAN[name].style != style:
            raise ValueError(f"{pattern}={style}: {name} must be {PLAN[name].style} or replicate")

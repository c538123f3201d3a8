"""Parses values as users write them: base models, layouts, role groups, sizes in bytes, weights."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...schemas.models import DraftConfig, NewDraft
from ...workers.protocol.parallel_spec import ParallelSpec, ShardedUnit
from ...workers.protocol.worker_config import RoleGroup, ServedModel
from ...workers.shapes.styles import replicated_units

ENVIRONMENT_PREFIX = "TRAINHOUSE_"
# Replaces a layout in --parallel: the smallest layout that fits is chosen.
AUTO = "auto"
_BYTE_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class TenantWeight:
    """A tenant's weight in the fair share of passes. name: as given to `trainhouse keys create`."""

    name: str
    weight: float


class ConfigError(ValueError):
    """An option has an invalid value; the message names the option, the value and the remedy."""


def parse_served_model(text: str) -> ServedModel:
    """Parses NAME, NAME=PATH_OR_HUB_ID or NAME=URL. Raises ConfigError."""
    name, _, source = (part.strip() for part in text.partition("="))
    if not name or ("=" in text and not source):
        raise ConfigError(f"base model {text!r} is not NAME[=PATH_OR_HUB_ID]")
    return ServedModel(name, str(Path(source).expanduser()) if source.startswith("~") else source or name)


NO_SHARD_OF_AUTO = "--shard needs an explicit layout: set --parallel to one other than auto, or leave --shard out"


def parse_layout(layout: str, flag: str = "--parallel") -> ParallelSpec:
    """Parses a layout such as fsdp=2,tp=4. The flag is named in the ConfigError."""
    try:
        return ParallelSpec.parse(layout)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def parse_shard(shard: Sequence[str]) -> tuple[ShardedUnit, ...]:
    """Returns the units that overrides of the form PATTERN=STYLE replicate. Raises ConfigError."""
    try:
        return replicated_units(shard)
    except ValueError as error:
        raise ConfigError(f"--shard: {error}") from None


def parse_role_group(text: str) -> RoleGroup:
    """Parses critic+reference=fsdp=2@cuda:1: roles, the layout of their ranks, and their devices, else those of the
    base model. Raises ConfigError."""
    roles, _, apart = text.partition("=")
    layout, at, devices = (part.strip() for part in apart.partition("@"))
    if not layout or (at and not devices):
        raise ConfigError(
            f"role group {text!r} is not ROLES=LAYOUT[@DEVICE], such as reference=single or "
            "critic+reference=tp=2@cuda:1"
        )
    if layout == AUTO:
        raise ConfigError(f"role group {text!r}: only --parallel can be auto: name a layout, such as single or tp=2")
    named = tuple(role.strip() for role in roles.split("+"))
    spec = parse_layout(layout, flag=f"role group {text!r}")
    return RoleGroup(named, spec, tuple(devices.split(",")) if devices else ())


def draft_fields(text: str, place: str) -> dict[str, str]:
    """Splits ALGORITHM[,FIELD=VALUE...], the form in which drafts are given; the algorithm is a field, too.

    Raises ConfigError, which names the place, if a field is given twice or the text has another form.
    """
    if text.lstrip().startswith("{"):
        raise ConfigError(f"{place} is {text!r}: write it without JSON, such as eagle3,draft_vocab_size=32000")
    algorithm, *given = text.split(",")
    fields = {"algorithm": algorithm}
    for each in given:
        name, _, value = each.partition("=")
        if name == "algorithm":
            raise ConfigError(f"{place} is {text!r}: write the algorithm alone, at the front, such as eagle3")
        if name in fields:
            raise ConfigError(f"{place} has {name} twice, {fields[name]!r} and {value!r}: give it once")
        fields[name] = value
    return fields


def parse_draft_shape(text: str, place: str) -> DraftConfig:
    """Parses the fields of `draft` of create_model, such as eagle3,capture_layers=1+14. Raises ValueError."""
    fields: dict[str, object] = dict(draft_fields(text, place))
    if isinstance(layers := fields.get("capture_layers"), str):
        fields["capture_layers"] = layers.split("+")
    return NewDraft.model_validate(fields)


def is_url(text: str) -> bool:
    return "://" in text


def parse_bytes(text: str) -> int:
    """Parses 1048576, 1MiB or 1.5GiB. Raises ValueError."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2] not in _BYTE_UNITS:
        raise ValueError(text)
    if not found[2]:
        return int(found[1])
    return int(float(found[1]) * _BYTE_UNITS[found[2]])


def show_bytes(value: int) -> str:
    unit = next(unit for unit in ("GiB", "MiB", "KiB", "") if value % _BYTE_UNITS[unit] == 0)
    return f"{value // _BYTE_UNITS[unit]}{unit}"


def parse_weights(text: str) -> tuple[TenantWeight, ...]:
    """Parses alice=2,bob=0.5. Raises ConfigError."""
    weights = tuple(_parse_weight(entry.strip()) for entry in text.split(",") if entry.strip())
    named: dict[str, float] = {}
    for tenant in weights:
        if tenant.name in named:
            both = f"{named[tenant.name]:g} and {tenant.weight:g}"
            raise ConfigError(f"tenant weights list {tenant.name} twice, with {both}: list it once")
        named[tenant.name] = tenant.weight
    return weights


def _parse_weight(text: str) -> TenantWeight:
    name, _, number = (part.strip() for part in text.rpartition("="))
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not name or not 0 < weight < math.inf:
        raise ConfigError(f"tenant weight {text!r} is not NAME=WEIGHT with a finite weight above 0, such as alice=2")
    return TenantWeight(name, weight)

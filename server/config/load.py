"""Reads the knobs of a process: a flag overrides an environment variable TRAINHOUSE_*, which overrides the TOML file,
which overrides the default."""

import difflib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..files.storage_config import CheckpointStorageConfig
from ..store import StoreConfig
from .knob import Knob
from .knob_values import ENVIRONMENT_PREFIX, ConfigError
from .server_config import KNOBS, SECTION_OF, SECTIONS, ServerConfig

WORKERS_ARE_ON_RAY = (
    "workers that outlive the server are on Ray: start a cluster (docs/cluster.md), then `trainhouse serve --pool ray "
    "--ray-address HOST:6379 --keep-workers-seconds 600`"
)
REPLACED = ("workers", "workers_secret_file")
"""Former knobs, replaced by these."""
Flags = Mapping[str, str | Sequence[str]]
"""Flags as typed, by knob."""


def load_config(flags: Flags, environment: Mapping[str, str], file: Path | None) -> ServerConfig:
    """Returns the configuration of a process. Raises ConfigError."""
    values = _given(flags, environment, file)
    config = ServerConfig.of(**values)
    for name in values:
        _check_effect(config, KNOBS[name])
    return config


def store_config_of(flags: Flags, environment: Mapping[str, str], file: Path | None) -> StoreConfig:
    """Returns the store config of a server with these settings, for commands that need no other. Raises ConfigError."""
    return StoreConfig(**_chosen(StoreConfig, _given(flags, environment, file)))


def storage_config_of(flags: Flags, environment: Mapping[str, str], file: Path | None) -> CheckpointStorageConfig:
    """Returns the checkpoint storage config of a server with these settings. Raises ConfigError."""
    return CheckpointStorageConfig(**_chosen(CheckpointStorageConfig, _given(flags, environment, file)))


def _chosen(target: type[Any], given: Mapping[str, object]) -> dict[str, Any]:
    """Returns the values of the knobs that `target` also has as fields."""
    chosen = {name: given.get(name, KNOBS[name].default) for entry in fields(target) if (name := entry.name) in KNOBS}
    for name, value in chosen.items():
        KNOBS[name].check_value(value)
    return chosen


def _given(flags: Flags, environment: Mapping[str, str], file: Path | None) -> dict[str, object]:
    of_flags = {name: KNOBS[name].kind.read(value, KNOBS[name].flag) for name, value in flags.items()}
    return {**_from_file(file), **_from_environment(environment), **of_flags}


def _from_file(file: Path | None) -> dict[str, object]:
    if file is None:
        return {}
    try:
        table = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"config file {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"config file {file} is not valid TOML: {error}") from None
    return {name: _from_toml(KNOBS[name], value, f"{name} in {file}") for name, value in _entries(table, file)}


def _entries(table: Mapping[str, object], file: Path) -> Iterator[tuple[str, object]]:
    """Yields the file's keys, which may be in tables named like their sections. Raises ConfigError."""
    for key, value in table.items():
        if key in SECTIONS and isinstance(value, dict):
            for name, entry in value.items():
                if SECTION_OF.get(name) not in (key, None):
                    raise ConfigError(f"config file {file} has {name} in [{key}]: move it to [{SECTION_OF[name]}]")
                yield _known(name, file), entry
        else:
            yield _known(key, file), value


def _known(key: str, file: Path) -> str:
    if key not in KNOBS:
        raise ConfigError(f"config file {file} has an unknown key {key!r}{_nearest(key)}")
    return key


def _from_toml(knob: Knob, value: object, place: str) -> object:
    """Parses strings as on the command line; numbers must have the knob's type."""
    if isinstance(value, str):
        return knob.kind.read(value, place)
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return knob.kind.read(value, place)
    if type(value) is int and knob.kind.number is not None:
        return knob.kind.number(value)
    if type(value) is float and knob.kind.number is float:
        return value
    raise knob.kind.refusal(value, place)


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """Reads TRAINHOUSE_* variables.

    Ignores unknown names, since Kubernetes and our client set some, unless they look misspelt.
    """
    found = {}
    for key, text in environment.items():
        name = key.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not key.startswith(ENVIRONMENT_PREFIX):
            continue
        if name in KNOBS:
            separator = KNOBS[name].kind.separator
            entries = text if separator is None else [entry.strip() for entry in text.split(separator)]
            found[name] = KNOBS[name].kind.read(entries, key)
        elif name in REPLACED or difflib.get_close_matches(name, KNOBS, cutoff=0.9):
            raise ConfigError(f"unknown environment variable {key}{_nearest(name, _variable)}")
    return found


def _variable(name: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"


def _nearest(name: str, spelled: Callable[[str], str] = str) -> str:
    if name in REPLACED:
        return f": {WORKERS_ARE_ON_RAY}"
    near = difflib.get_close_matches(name, KNOBS, n=1)
    return f": did you mean {spelled(near[0])}?" if near else ": see `trainhouse serve --help-all` for all options"


def _check_effect(config: ServerConfig, knob: Knob) -> None:
    if knob.only_with is not None:
        mode, wanted = knob.only_with
        if config.value(mode) != wanted:
            raise ConfigError(
                f"{knob.name} has no effect with {mode} {config.value(mode)}: leave it out or set {mode} to {wanted}"
            )
    if knob.not_with is not None:
        mode, value = knob.not_with
        if config.value(mode) == value:
            raise ConfigError(f"{knob.name} has no effect with {mode} {value}: leave it out or change {mode}")

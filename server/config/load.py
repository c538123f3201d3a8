"""Reads the options of a process: a flag overrides an environment variable TRAINHOUSE_*, which overrides the TOML file,
which overrides the default."""

import difflib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from .option import Flags, Option, options_of
from .option_values import ENVIRONMENT_PREFIX, ConfigError
from .server_config import OPTIONS, SECTION_OF, SECTIONS, ServerConfig

WORKERS_ARE_ON_RAY = (
    "workers that outlive the server are on Ray: start a cluster (docs/cluster.md), then `trainhouse serve --pool ray "
    "--ray-address HOST:6379 --keep-workers-seconds 600`"
)
REPLACED = ("workers", "workers_secret_file")
"""Former options, replaced by these."""
Section = TypeVar("Section")


def load_config(flags: Flags, environment: Mapping[str, str], file: Path | None) -> ServerConfig:
    """Returns the configuration of a process. Raises ConfigError."""
    values = _given(flags, environment, file)
    config = ServerConfig.of(**values)
    for name in values:
        _check_effect(config, OPTIONS[name])
    return config


def load_section(kind: type[Section], flags: Flags, environment: Mapping[str, str], file: Path | None) -> Section:
    """Returns a part of a server's configuration, for a command that needs no other. Raises ConfigError."""
    given = _given(flags, environment, file)
    return kind(**{name: each.checked(given[name]) for name, each in options_of(kind).items() if name in given})


def _given(flags: Flags, environment: Mapping[str, str], file: Path | None) -> dict[str, object]:
    of_flags = {name: OPTIONS[name].read(value, OPTIONS[name].flag) for name, value in flags.items()}
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
    return {name: OPTIONS[name].read(value, f"{name} in {file}") for name, value in _entries(table, file)}


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
    if key not in OPTIONS:
        raise ConfigError(f"config file {file} has an unknown key {key!r}{_nearest(key)}")
    return key


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """Reads TRAINHOUSE_* variables. Unknown names, some of which Kubernetes and our client set, are ignored unless they
    look misspelt."""
    found = {}
    for key, text in environment.items():
        name = key.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not key.startswith(ENVIRONMENT_PREFIX):
            continue
        if name in OPTIONS:
            separator = OPTIONS[name].form.separator
            entries = text if separator is None else [entry.strip() for entry in text.split(separator)]
            found[name] = OPTIONS[name].read(entries, key)
        elif name in REPLACED or difflib.get_close_matches(name, OPTIONS, cutoff=0.9):
            raise ConfigError(f"unknown environment variable {key}{_nearest(name, _variable)}")
    return found


def _variable(name: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"


def _nearest(name: str, spelled: Callable[[str], str] = str) -> str:
    if name in REPLACED:
        return f": {WORKERS_ARE_ON_RAY}"
    near = difflib.get_close_matches(name, OPTIONS, n=1)
    return f": did you mean {spelled(near[0])}?" if near else ": see `trainhouse serve --help-all` for all options"


def _check_effect(config: ServerConfig, option: Option) -> None:
    if option.only_with is not None:
        mode, wanted = option.only_with
        if config.value(mode) != wanted:
            raise ConfigError(
                f"{option.name} has no effect with {mode} {config.value(mode)}: leave it out or set {mode} to {wanted}"
            )
    if option.not_with is not None:
        mode, value = option.not_with
        if config.value(mode) == value:
            raise ConfigError(f"{option.name} has no effect with {mode} {value}: leave it out or change {mode}")

"""Works out where the official SDK looks for the tokenizer of a base model, and whether it finds one.

Training clients of the SDK get the `tokenizer_id` from the server. Sampling clients only have the served name, which
they pass to transformers: a hub id, or a directory on the client's machine.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...schemas.bounds import load_json
from ...workers.protocol.worker_config import ServedModel

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_WITH_OWN_TOKENIZERS = ("TML/", "thinkingmachines/")
"""Prefixes of names for which the SDK never asks the hub: it has the tokenizer itself, or none."""
_ORIGINS = (("config.json", "_name_or_path"), ("tokenizer_config.json", "name_or_path"))


def tokenizer_id(model: ServedModel, is_local: bool) -> str:
    """Returns what the SDK's training clients pass to transformers.

    A directory is only reported to clients on this machine. Others get the served name if it is a hub id, else the hub
    id that the model's files name.
    """
    if not Path(model.source).is_dir():
        return model.source
    directory = str(Path(model.source).absolute())
    if is_local and ":" not in directory:  # the SDK truncates the id at a colon
        return directory
    return model.name if _is_found(model.name, is_local) else _origin(model) or model.name


def warn_unresolved(models: Sequence[ServedModel], is_loopback: bool) -> Iterator[str]:
    """Yields a warning for each served name under which the SDK finds no tokenizer."""
    for model in models:
        if not _is_found(model.name, is_loopback):
            hub_id = _origin(model) or "ORGANISATION/MODEL, its name on the hub"
            yield (
                f"{model.name} is not a hub id, but the official SDK's sampling clients look for its tokenizer on the "
                f"hub (our client gets it from this server): serve {model.source} under the name {hub_id}"
            )


def _is_found(name: str, is_loopback: bool) -> bool:
    place = _sdk_tokenizer_name(name)
    if place.startswith(_WITH_OWN_TOKENIZERS):
        return False
    return _HUB_ID.fullmatch(place) is not None or (is_loopback and Path(place).is_absolute() and Path(place).is_dir())


def _sdk_tokenizer_name(name: str) -> str:
    """Returns the tokenizer id that tinker.lib.public_interfaces.sampling_client derives from a served name.

    ORGANISATION/MODEL/VARIANT and MODEL:VARIANT become MODEL. A directory with two slashes is truncated the same way.
    """
    parts = name.partition(":")[0].split("/")
    return "/".join(parts[:2]) if len(parts) == 3 else "/".join(parts)


def _origin(model: ServedModel) -> str | None:
    """Returns the hub id that the files in the model's directory name as their origin."""
    for file, key in _ORIGINS:
        try:
            named = load_json(Path(model.source, file).read_text()).get(key)
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(named, str) and _HUB_ID.fullmatch(named):
            return named
    return None

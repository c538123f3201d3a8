"""Hub names: where the official SDK looks for the tokenizer of a base model, and whether it finds one there.

Its training clients ask the server (`tokenizer_id`). Its sampling clients know the served name alone, which they give
to transformers: a hub id, or a directory of the client's machine.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...workers.protocol.config import ServedModel

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_WITH_OWN_TOKENIZERS = ("TML/", "thinkingmachines/")
"""Of such names the SDK has the tokenizers itself, or none."""
_ORIGINS = (("config.json", "_name_or_path"), ("tokenizer_config.json", "name_or_path"))


def tokenizer_id(model: ServedModel, is_loopback: bool) -> str:
    """What the SDK's training clients give to transformers.

    A directory is told to clients on this machine alone; others get the hub id that its files name, where the served
    name is none.
    """
    if not Path(model.source).is_dir():
        return model.source
    directory = str(Path(model.source).absolute())
    if is_loopback and ":" not in directory:  # the SDK cuts the id there
        return directory
    return model.name if _is_found(model.name, is_loopback) else _origin(model) or model.name


def unresolved(models: Sequence[ServedModel], is_loopback: bool) -> Iterator[str]:
    """Warnings: of each name under which the SDK finds no tokenizer."""
    for model in models:
        if not _is_found(model.name, is_loopback):
            hub_id = _origin(model) or "ORGANISATION/MODEL, its name on the hub"
            yield (
                f"{model.name} is no id of the hub, where the official SDK's sampling clients look for its tokenizer "
                f"(ours gets it from here): serve {model.source} under the name {hub_id}"
            )


def _is_found(name: str, is_loopback: bool) -> bool:
    place = _looked_up(name)
    if place.startswith(_WITH_OWN_TOKENIZERS):
        return False
    return _HUB_ID.fullmatch(place) is not None or (is_loopback and Path(place).is_absolute() and Path(place).is_dir())


def _looked_up(name: str) -> str:
    """As tinker.lib.public_interfaces.sampling_client makes it of a name: ORGANISATION/MODEL/VARIANT and MODEL:VARIANT
    are MODEL. So is a directory with two slashes, to its harm."""
    parts = name.partition(":")[0].split("/")
    return "/".join(parts[:2]) if len(parts) == 3 else "/".join(parts)


def _origin(model: ServedModel) -> str | None:
    """The hub id that the files of a directory name as theirs."""
    for file, key in _ORIGINS:
        try:
            named = json.loads(Path(model.source, file).read_text()).get(key)
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(named, str) and _HUB_ID.fullmatch(named):
            return named
    return None

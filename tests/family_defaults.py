"""Writes workers/shapes/families/defaults.json from transformers' config classes: `make families` runs it.

The server reads the file because it imports neither torch nor transformers.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..workers.shapes.families import FAMILIES
from ..workers.shapes.other_models import TEXT_PARTS

FILE = Path(__file__).parent.parent / "workers" / "shapes" / "families" / "defaults.json"

_OF_ALL = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}


def fields_of(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Returns the fields that a config class adds to transformers' base class, with their defaults."""
    fields = (field for field in dataclasses.fields(kind) if field.name not in _OF_ALL)
    defaults = {field.name: field.default for field in fields if not field.name.endswith("_token_id")}
    plain = (bool, int, float, str, list, tuple, type(None))
    return {name: value for name, value in sorted(defaults.items()) if isinstance(value, plain)}


def text_defaults(whole: str) -> dict[str, Any]:
    """Returns the defaults of a multimodal model's text part that differ from those of the text part's own type.

    `tie_word_embeddings` is left out, because the whole decides it.
    """
    whole_config: Any = CONFIG_MAPPING[whole]
    kind = type(whole_config().text_config)
    of_type, of_part = fields_of(CONFIG_MAPPING[TEXT_PARTS[whole]]), fields_of(kind)
    in_whole, alone = vars(whole_config(text_config={"model_type": kind.model_type}).text_config), vars(kind())
    if any(in_whole.get(name) != alone.get(name) for name in of_part):
        of_part |= whole_config.sub_configs_defaults["text_config"].init_kwargs
    names = sorted(of_part.keys() - {"tie_word_embeddings"})
    return {name: of_part[name] for name in names if of_part[name] != of_type.get(name)}


def defaults() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    types = {name: fields_of(CONFIG_MAPPING[name]) for name in sorted(FAMILIES)}
    parts = {name: text_defaults(name) for name in sorted(TEXT_PARTS) if name in CONFIG_MAPPING}
    return {"types": types, "text_parts": {name: fields for name, fields in parts.items() if fields}}


def text() -> str:
    """Returns the file's content: a line for each type."""
    sections = [
        f'  "{name}": {{\n' + ",\n".join(f'    "{key}": {json.dumps(row)}' for key, row in rows.items()) + "\n  }"
        for name, rows in defaults().items()
    ]
    return "{\n" + ",\n".join(sections) + "\n}\n"


if __name__ == "__main__":
    sys.exit(FILE.write_text(text(), "utf-8") and None)

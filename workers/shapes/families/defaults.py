"""Values of fields that a config.json may leave out, as transformers' config classes declare them.

`make families` writes defaults.json, because the server imports neither torch nor transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path

_DECLARED = json.loads(Path(__file__).with_name("defaults.json").read_text("utf-8"))

TYPES: Mapping[str, Mapping[str, object]] = _DECLARED["types"]
"""Keyed by the model_type of a text model."""

TEXT_PARTS: Mapping[str, Mapping[str, object]] = _DECLARED["text_parts"]
"""Keyed by the model_type of a multimodal model whose text part has other defaults than its own type."""

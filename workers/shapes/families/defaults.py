"""Values of fields that a config.json may leave out, as transformers' config classes declare them.

`make families` writes defaults.json, because the server imports neither torch nor transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path

_DECLARED = json.loads(Path(__file__).with_name("defaults.json").read_text("utf-8"))

TYPES: Mapping[str, Mapping[str, object]] = _DECLARED["types"]
"""By model_type of a text model."""

TEXT_PARTS: Mapping[str, Mapping[str, object]] = _DECLARED["text_parts"]
"""By model_type of a multimodal model whose part for text has other defaults than the text part's own type."""

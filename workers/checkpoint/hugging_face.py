"""Stores fully trained models in the form of Hugging Face, with a config and the tokenizer."""

import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, PreTrainedConfig

from ...schemas.errors import OperationError
from ...schemas.models import LoraConfig
from ..full import FullWeights
from .checkpoint_format import CheckpointFormat
from .description import CheckpointDescription

WEIGHTS = "model"

# Files of the base model that do not depend on its weights.
_BESIDE = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.jinja",
    "generation_config.json",
)


class HuggingFaceFormat(CheckpointFormat):
    stem = WEIGHTS

    def __init__(self, model: FullWeights) -> None:
        self._model = model

    def check(self, saved: CheckpointDescription) -> None:
        if isinstance(saved.training, LoraConfig):
            raise OperationError(
                "the checkpoint is an adapter, and the model is fully trained: create a model with LoRA and load into"
                " that"
            )

    def constants(self) -> Mapping[str, Tensor]:
        return self._model.buffers()

    def write_extra_files(self, directory: Path, base_name: str) -> None:
        config: PreTrainedConfig = deepcopy(self._model.config)
        config.dtype = "float32"
        if self._model.program.head == "values":
            architecture: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
            names = [architecture.__name__] if architecture is not None else None
            config.update({"architectures": names, "num_labels": 1})
        config.save_pretrained(directory)
        for pattern in _BESIDE:
            for path in Path(self._model.source).glob(pattern):  # finds nothing if the source is a hub id
                if path.is_file():
                    shutil.copyfile(path, directory / path.name)

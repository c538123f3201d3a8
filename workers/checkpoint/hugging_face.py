"""Stores fully trained models in the form of Hugging Face, with a config and the tokenizer."""

import shutil
from collections.abc import Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, PreTrainedConfig

from ...schemas.errors import OperationError
from ...schemas.models import LoraConfig
from ..full import FullWeights
from .description import CheckpointDescription
from .tensor_files import Place

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


class HuggingFaceFormat:
    """Implements CheckpointFormat for fully trained models."""

    stem, is_read_at_once = WEIGHTS, False

    def __init__(self, model: FullWeights) -> None:
        self._model = model

    def legacy_name(self, name: str) -> str:
        return name

    def joined_tensors(self) -> Mapping[str, Mapping[str, Place]]:
        return {}

    def missing_tensors(self, saved: CheckpointDescription) -> Collection[str]:
        return ()

    def describe(self) -> dict[str, Any]:
        return {}

    def check(self, saved: CheckpointDescription) -> None:
        if isinstance(saved.training, LoraConfig):
            raise OperationError(
                "the checkpoint is an adapter, and the model is fully trained: create a model with LoRA and load into"
                " that"
            )

    def constants(self) -> Mapping[str, Tensor]:
        return self._model.buffers()

    def write_extra_files(self, directory: Path, base_name: str) -> None:
        _write_config(self._model, directory)
        for pattern in _BESIDE:
            for path in Path(self._model.source).glob(pattern):  # finds nothing if the source is a hub id
                if path.is_file():
                    shutil.copyfile(path, directory / path.name)

    def load_constants(self, constants: Mapping[str, Tensor], saved: CheckpointDescription) -> None:
        pass


def _write_config(model: FullWeights, directory: Path) -> None:
    config: PreTrainedConfig = deepcopy(model.config)
    config.dtype = "float32"
    if model.program.scores == "values":
        architecture: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
        names = [architecture.__name__] if architecture is not None else None
        config.update({"architectures": names, "num_labels": 1})
    config.save_pretrained(directory)

"""Stores drafts in the form that inference engines read: published tensor names, and their keys in the config.

model.safetensors        or several and their index; also d2t and t2d if its vocabulary is a part of the target's
target/                  in snapshots of earlier versions: the weights of its target, unless that is the bare base model
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ...schemas.models import DraftConfig
from ..checkpoint.checkpoint_format import CheckpointFormat
from ..checkpoint.description import CheckpointDescription, write_json
from .model.draft_model import DraftModel


class DraftFormat(CheckpointFormat):
    stem = "model"

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def describe(self) -> dict[str, Any]:
        return {} if self._model.has_full_vocabulary else {"vocabulary_is_chosen": self._model.vocabulary_is_chosen}

    def check(self, saved: CheckpointDescription) -> None:
        ours, theirs = self._model.draft, saved.training
        assert isinstance(theirs, DraftConfig)
        if (name := ours.differs_in(theirs)) is not None:
            raise OperationError(
                f"the checkpoint was saved with {name} {getattr(theirs, name)}, the draft has {getattr(ours, name)}:"
                " create a draft of that shape and load into that"
            )

    def write_extra_files(self, directory: Path, base_name: str) -> None:
        config = self._model.shape.config.to_dict() | {"dtype": "float32"}
        write_json(directory / "config.json", {**config, **self._model.inference_config()})

    def load_constants(self, constants: Mapping[str, Tensor], saved: CheckpointDescription) -> None:
        """Sets the draft's vocabulary."""
        if not self._model.has_full_vocabulary:
            offsets = constants["d2t"]
            self._model.vocabulary = (offsets + torch.arange(len(offsets))).to(self._model.vocabulary.device)
            # Files of earlier versions do not say, and a draft may have been trained without one.
            self._model.vocabulary_is_chosen = saved.content.get("vocabulary_is_chosen", True)

    def constants(self) -> Mapping[str, Tensor]:
        """Returns the vocabulary of a draft that has only a part of the target's tokens.

        d2t: int64 [V], for each of its tokens the target's id minus its own. t2d: bool [target's vocabulary], true for
        tokens that the draft has.
        """
        if self._model.has_full_vocabulary:
            return {}
        vocabulary = self._model.vocabulary.cpu()
        is_covered = torch.zeros(self._model.shape.target_vocabulary, dtype=torch.bool)
        is_covered[vocabulary] = True
        return {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": is_covered}

"""Drafts, with the two tables of tokens in a file beside the weights. Neither SGLang nor vLLM has loaded one yet."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ...schemas.models import DraftConfig
from ..drafts.model import DraftModel
from .description import Description
from .tensor_files import SavedTensors, save_tensors

_VOCABULARY = "vocabulary"

# What a draft is drawn by at first.
_NO_SHAPE = frozenset({"seed"})


class Draft:
    """See Form."""

    stem, is_small = "model", False

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def describe(self) -> dict[str, Any]:
        return {}

    def check(self, saved: Description) -> None:
        ours, theirs = self._model.draft, saved.training
        assert isinstance(theirs, DraftConfig)
        for name in DraftConfig.model_fields.keys() - _NO_SHAPE:
            of_model, of_saved = getattr(ours, name), getattr(theirs, name)
            if of_model != of_saved:
                raise OperationError(
                    f"{saved.directory} was saved with {name} {of_saved}, the draft has {of_model}: create a draft of"
                    " that shape and load into that"
                )

    def write_beside(self, directory: Path, num_parts: int, base_name: str) -> None:
        config = self._model.shape.config
        config.save_pretrained(directory)
        save_tensors(directory / f"{_VOCABULARY}.safetensors", self._tables())

    def read_beside(self, directory: Path) -> None:
        """The tokens that it can say. Raises OperationError."""
        offsets = SavedTensors(directory, _VOCABULARY, self._tables())["d2t"]
        self._model.vocabulary = (offsets + torch.arange(len(offsets))).to(self._model.vocabulary.device)

    def _tables(self) -> dict[str, Tensor]:
        """d2t: int64 [V], how far the id of each of its tokens is below the target's. t2d: bool, of the target's tokens
        whether it can say them."""
        said = self._model.vocabulary.cpu()
        can_say = torch.zeros(self._model.shape.target_vocabulary, dtype=torch.bool)
        can_say[said] = True
        return {"d2t": said - torch.arange(len(said)), "t2d": can_say}

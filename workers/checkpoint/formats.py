"""Selects the form in which a kind of model is stored."""

from ..drafts.draft_model import DraftModel
from ..full import FullWeights
from ..lora import Adapter
from ..state.trainable import Trainable
from .checkpoint_format import CheckpointFormat
from .draft_format import DraftFormat
from .hugging_face import HuggingFaceFormat
from .peft_format import PeftFormat


def format_of(model: Trainable) -> CheckpointFormat:
    if isinstance(model, Adapter):
        return PeftFormat(model)
    if isinstance(model, DraftModel):
        return DraftFormat(model)
    assert isinstance(model, FullWeights)
    return HuggingFaceFormat(model)

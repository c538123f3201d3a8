"""Selects the form in which a kind of model is stored."""

from ..full import FullWeights
from ..lora import Adapter
from ..protocol.plugins import plugin_rows
from ..state.trainable import Trainable
from .checkpoint_format import CheckpointFormat
from .hugging_face import HuggingFaceFormat
from .peft_format import PeftFormat


def format_of(model: Trainable) -> CheckpointFormat:
    if isinstance(model, Adapter):
        return PeftFormat(model)
    if isinstance(model, FullWeights):
        return HuggingFaceFormat(model)
    return plugin_rows("workers.drafts.rows", "FORMATS")[model.kind](model)

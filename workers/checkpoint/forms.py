"""Selects the form in which a kind of model is stored."""

from ..drafts.model import DraftModel
from ..full import FullWeights
from ..lora import Adapter
from ..state.trainable import Learner
from .draft import Draft
from .form import Form
from .hugging_face import HuggingFace
from .peft import Peft


def form_of(model: Learner) -> Form:
    if isinstance(model, Adapter):
        return Peft(model)
    if isinstance(model, DraftModel):
        return Draft(model)
    assert isinstance(model, FullWeights)
    return HuggingFace(model)

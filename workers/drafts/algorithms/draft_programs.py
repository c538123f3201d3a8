"""The programs of draft models, by algorithm."""

from dataclasses import dataclass

from ...losses import GUESS_LOSSES
from ...state.program import Program
from .algorithm import DraftAlgorithm
from .dflash import DFlash
from .eagle3 import Eagle3


@dataclass(frozen=True, kw_only=True)
class DraftProgram(Program):
    """A program whose model is no head over the base model's final hidden states, but a model that reads the hidden
    states of its target."""

    strategy: DraftAlgorithm


EAGLE3 = DraftProgram(
    role="draft", scores="losses", losses={"eagle3": GUESS_LOSSES["eagle3"]}, samples=False, strategy=Eagle3()
)
DFLASH = DraftProgram(
    role="draft", scores="losses", losses={"dflash": GUESS_LOSSES["dflash"]}, samples=False, strategy=DFlash()
)
DRAFT_PROGRAMS = {"eagle3": EAGLE3, "dflash": DFLASH}

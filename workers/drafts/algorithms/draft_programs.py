"""The programs of draft models, by algorithm."""

from dataclasses import dataclass

from ...state.program import Program
from ..losses import DRAFT_LOSSES
from .algorithm import DraftAlgorithm
from .dflash import DFlash
from .eagle3 import Eagle3


@dataclass(frozen=True, kw_only=True)
class DraftProgram(Program):
    """A program whose model is no head over the base model, but reads the hidden states of its target."""

    algorithm: DraftAlgorithm


def _program(name: str, algorithm: DraftAlgorithm) -> DraftProgram:
    losses = {name: DRAFT_LOSSES[name]}
    return DraftProgram(role="draft", head="losses", losses=losses, samples=False, algorithm=algorithm)


DRAFT_PROGRAMS = {"eagle3": _program("eagle3", Eagle3()), "dflash": _program("dflash", DFlash())}

"""The kinds of model, one a file: what each scores, learns beside LoRA and is trained by."""

from ...schemas.models import DraftConfig, TrainingConfig
from .critic import CRITIC
from .dflash import DFLASH
from .eagle3 import EAGLE3
from .policy import POLICY
from .program import Program
from .reference import REFERENCE

PROGRAMS = {"policy": POLICY, "critic": CRITIC, "reference": REFERENCE, "eagle3": EAGLE3, "dflash": DFLASH}


def program_of(role: str, training: TrainingConfig) -> Program:
    """Of drafts there are several. Raises KeyError on a role that this version does not know."""
    return PROGRAMS[training.algorithm if isinstance(training, DraftConfig) else role]


__all__ = ["PROGRAMS", "Program", "program_of"]

"""The kinds of model by name."""

from collections.abc import Mapping

from ...schemas.models import DraftConfig, TrainingConfig
from ..drafts.algorithms.programs import DRAFT_PROGRAMS
from ..programs.critic import CRITIC
from ..programs.policy import POLICY
from ..programs.reference import REFERENCE
from ..state.program import Program

PROGRAMS: Mapping[str, Program] = {"policy": POLICY, "critic": CRITIC, "reference": REFERENCE, **DRAFT_PROGRAMS}


def program_of(role: str, training: TrainingConfig) -> Program:
    """Of drafts there are several. Raises KeyError on a role that this version does not know."""
    return PROGRAMS[training.algorithm if isinstance(training, DraftConfig) else role]

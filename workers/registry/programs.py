"""Maps names to the programs of runs: policy, critic, reference and the draft algorithms."""

from collections.abc import Mapping

from ...schemas.models import DraftConfig, TrainingConfig
from ..drafts.algorithms.draft_programs import DRAFT_PROGRAMS
from ..programs.critic import CRITIC
from ..programs.policy import POLICY
from ..programs.reference import REFERENCE
from ..state.program import Program

PROGRAMS: Mapping[str, Program] = {"policy": POLICY, "critic": CRITIC, "reference": REFERENCE, **DRAFT_PROGRAMS}


def program_of(role: str, training: TrainingConfig) -> Program:
    """Returns the run's program; drafts have one per algorithm. Raises KeyError if this version does not have the
    role.
    """
    return PROGRAMS[training.algorithm if isinstance(training, DraftConfig) else role]

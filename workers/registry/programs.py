"""Maps names to the programs of runs: policy, critic, reference and those of plugins."""

from collections.abc import Mapping

from ...schemas.errors import OperationError
from ...schemas.models import DraftConfig, TrainingConfig
from ..programs.critic import CRITIC
from ..programs.policy import POLICY
from ..programs.reference import REFERENCE
from ..protocol.plugins import plugin_rows
from ..state.program import Program

PROGRAMS: Mapping[str, Program] = {"policy": POLICY, "critic": CRITIC, "reference": REFERENCE}


def program_of(role: str, training: TrainingConfig) -> Program:
    """Returns the run's program; drafts have one per algorithm.

    Raises:
        KeyError: this version does not have the role.
        OperationError: drafts are not installed.
    """
    if not isinstance(training, DraftConfig):
        return PROGRAMS[role]
    programs = plugin_rows("workers.drafts.rows", "PROGRAMS")
    if not programs:
        raise OperationError("draft models need workers/drafts, which this installation is without")
    return programs[training.algorithm]

"""The rows of drafts in the tables of a rank."""

from ...schemas.models import DraftConfig
from .algorithms.draft_programs import DRAFT_PROGRAMS
from .draft_format import DraftFormat
from .losses import CAPTURES, DRAFT_LOSSES
from .model.draft_kind import DraftKind
from .training.draft_pass import DraftPassRunner
from .training.feature_capture import CapturingPassRunner
from .verbs import DraftVerbs

PROGRAMS = DRAFT_PROGRAMS
LOSSES = {**DRAFT_LOSSES, **CAPTURES}
KINDS = {DraftConfig: DraftKind}
FORMATS = {DraftKind.name: DraftFormat}
STRATEGIES = {"drafts": DraftPassRunner, "captures": CapturingPassRunner}
VERBS = {"drafts": DraftVerbs}

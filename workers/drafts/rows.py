"""The rows of drafts in the tables of a rank."""

from collections.abc import Callable, Mapping
from functools import partial

from ...schemas.models import DraftConfig
from ..models.model import BaseModel
from ..registry.model_registry import ModelRegistry
from ..sampler.cache.cache import CacheBudget
from ..sampler.speculation import NewProposer
from .algorithms.draft_programs import DRAFT_PROGRAMS
from .draft_format import DraftFormat
from .losses import DRAFT_LOSSES
from .model.draft_kind import DraftKind
from .speculation.draft_proposer import DraftCaches, DraftProposer
from .training.draft_pass import DraftStrategy
from .training.feature_capture import CapturingPassRunner
from .verbs import DraftVerbs

PROGRAMS = DRAFT_PROGRAMS
LOSSES = DRAFT_LOSSES
KINDS = {DraftConfig: DraftKind}
FORMATS = {DraftKind.name: DraftFormat}
STRATEGIES = {DraftKind.name: DraftStrategy, "captures": CapturingPassRunner}
VERBS = {"drafts": DraftVerbs}
PROPOSERS: Mapping[str, Callable[[BaseModel, ModelRegistry, CacheBudget], NewProposer]] = {
    "drafts": lambda base, models, budget: partial(DraftProposer, base, models, DraftCaches(base, budget))
}

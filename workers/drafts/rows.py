"""The rows of draft models in the core's tables."""

from collections.abc import Mapping
from functools import partial

from ..models.model import BaseModel
from ..registry.model_registry import ModelRegistry
from ..sampler.cache.cache_budget import CacheBudget
from ..sampler.speculation import NewProposer, ProposerRow
from .speculation.draft_caches import DraftCaches
from .speculation.draft_proposer import DraftProposer


def _proposers(base: BaseModel, models: ModelRegistry, budget: CacheBudget) -> NewProposer:
    return partial(DraftProposer, base, models, DraftCaches(base, budget))


PROPOSERS: Mapping[str, ProposerRow] = {"drafts": _proposers}

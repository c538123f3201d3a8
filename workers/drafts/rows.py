"""The rows of draft models in the core's tables."""

from collections.abc import Callable, Mapping
from functools import partial

from ..models.model import BaseModel
from ..registry.model_registry import ModelRegistry
from ..sampler.cache.cache import CacheBudget
from ..sampler.speculation import NewProposer
from .speculation.draft_caches import DraftCaches
from .speculation.draft_proposer import DraftProposer


def _proposers(base: BaseModel, models: ModelRegistry, budget: CacheBudget) -> NewProposer:
    return partial(DraftProposer, base, models, DraftCaches(base, budget))


PROPOSERS: Mapping[str, Callable[[BaseModel, ModelRegistry, CacheBudget], NewProposer]] = {"drafts": _proposers}

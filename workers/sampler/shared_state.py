"""The parts of a sampler that outlive it, or that several share: caches and the tokenizer."""

from dataclasses import dataclass

from ..heads import LogprobHead
from ..models.model import BaseModel
from ..protocol.plugins import plugin_rows
from ..protocol.worker_config import WorkerConfig
from ..registry.model_registry import ModelRegistry
from .cache.cache import KVCache
from .cache.weight_versions import WeightVersions
from .decoding.rank_sync import RankSync
from .requests.lazy_tokenizer import LazyTokenizer
from .sampled_flops import SampledFlops
from .speculation.proposer import NewProposer, Proposer


@dataclass(frozen=True)
class SharedState:
    """The parts that all samplers of a rank share. Caches of drafts use the cache's budget."""

    cache: KVCache
    new_proposer: NewProposer
    weight_versions: WeightVersions
    text: LazyTokenizer
    flops: SampledFlops

    @classmethod
    def of(cls, base: BaseModel, models: ModelRegistry, config: WorkerConfig) -> "SharedState":
        cache = KVCache.of(base, config)
        with_drafts = plugin_rows("workers.drafts.rows", "PROPOSERS").get("drafts")
        new_proposer = with_drafts(base, models, cache.budget) if with_drafts else _without_drafts
        text = LazyTokenizer(config.model.source, base)
        return cls(cache, new_proposer, WeightVersions(models), text, SampledFlops(base, models))


def _without_drafts(head: LogprobHead, ranks: RankSync) -> Proposer:
    return Proposer()

"""The parts of a sampler that outlive it, or that several share: caches and the tokenizer."""

from dataclasses import dataclass

from ..models.model import BaseModel
from ..protocol.worker_config import WorkerConfig
from ..registry.model_registry import ModelRegistry
from .cache.cache import KVCache
from .cache.draft_caches import DraftCaches
from .cache.weight_versions import WeightVersions
from .requests.lazy_tokenizer import LazyTokenizer
from .sampled_flops import SampledFlops


@dataclass(frozen=True)
class SharedState:
    """The parts that all samplers of a rank share. The draft caches use the cache's budget."""

    cache: KVCache
    draft_caches: DraftCaches
    weight_versions: WeightVersions
    text: LazyTokenizer
    flops: SampledFlops

    @classmethod
    def of(cls, base: BaseModel, models: ModelRegistry, config: WorkerConfig) -> "SharedState":
        cache = KVCache.of(base, config)
        drafts, text = DraftCaches(base, cache.budget), LazyTokenizer(config.model.source, base)
        return cls(cache, drafts, WeightVersions(models), text, SampledFlops(base, models))

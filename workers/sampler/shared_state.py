"""The state that samplers of a rank share: model, KV cache, weight versions, tokenizer and FLOP count."""

from collections.abc import Sequence
from itertools import count
from weakref import WeakKeyDictionary

import numpy as np

from ..batch.validated import ModelLimits
from ..models.model import BaseModel
from ..parallel.mesh import Mesh
from ..protocol.plugins import plugin_rows
from ..protocol.worker_config import WorkerConfig
from ..registry.model_registry import ModelRegistry
from ..shapes.layouts.flops import ModelFlops, OwnFlops
from ..shapes.model_shape import ModelShape
from ..state.trainable import Trainable
from .batch import Batch
from .cache.cache import KVCache
from .requests.jobs import Job
from .requests.text import LazyTokenizer
from .sampling import AdapterSpan
from .speculation import NewProposer

_BASE = OwnFlops()


class WeightVersions:
    """Gives weights that change a new version, a number that no other weights had before.

    The base model has one version per owner of jobs, so that response times and prompt_cache_hit_tokens do not reveal
    other tenants' prompts. An adapter has only one owner.
    """

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._of_base: dict[str, int] = {}
        self._of_models: WeakKeyDictionary[Trainable, tuple[int, int]] = WeakKeyDictionary()
        self._numbers = count()

    def of(self, job: Job) -> int:
        """Returns the current version of the weights that the job samples."""
        if job.adapter_id is None:
            owner = job.spec.tenant_id
            if owner not in self._of_base:
                self._of_base[owner] = next(self._numbers)
            return self._of_base[owner]
        model = self._models.get(job.adapter_id)
        num_changes, version = self._of_models.get(model, (-1, -1))
        if num_changes != model.vectors.num_changes:
            version = next(self._numbers)
            self._of_models[model] = model.vectors.num_changes, version
        return version


class SampledFlops:
    """Counts the operations that the model needs for what a rank samples, until `take`.

    None for models whose layers are not declared, and none for draft models, draft tokens that are not accepted and
    log-probabilities of prompts.
    """

    def __init__(self, base: BaseModel, models: ModelRegistry) -> None:
        self._of_base = ModelFlops(base.shape) if isinstance(base.shape, ModelShape) else None
        self._models = models
        self._total = 0.0

    def take(self) -> float:
        total, self._total = self._total, 0.0
        return total

    def add(self, spans: Sequence[AdapterSpan], starts: np.ndarray, stops: np.ndarray) -> None:
        """Counts tokens starts:stops of sequences, int64 [n]. spans: of all these tokens."""
        if self._of_base is None:
            return
        self._total += self._of_base.trunk(stops) - self._of_base.trunk(starts)
        self._total += sum(span.length * self._own(span).trunk for span in spans)

    def add_scored(self, spans: Sequence[AdapterSpan]) -> None:
        """Counts the output head for hidden states."""
        if self._of_base is not None:
            self._total += sum(self._of_base.head(span.length, self._own(span)) for span in spans)

    def add_steps(self, spans: Sequence[AdapterSpan], lengths: np.ndarray, num_steps: int) -> None:
        """Counts decode steps of sequences of which so many tokens have run before, int64 [n]."""
        spans = [AdapterSpan(span.adapter_id, num_steps * span.length) for span in spans]
        self.add(spans, lengths, lengths + num_steps)
        self.add_scored(spans)

    def add_batch(self, batch: Batch) -> None:
        """Counts the tokens of a packed row below the head, except for draft tokens."""
        if chunks := [chunk for chunk in batch.chunks if chunk.draft is None]:
            spans = [AdapterSpan(chunk.sequence.job.adapter_id, chunk.length) for chunk in chunks]
            self.add(spans, np.array([chunk.start for chunk in chunks]), np.array([chunk.stop for chunk in chunks]))
        if batch.decoding.sequences:
            starts = batch.decoding.positions()
            self.add(batch.decoding.adapter_spans(), starts, starts + 1)

    def _own(self, span: AdapterSpan) -> OwnFlops:
        model = None if span.adapter_id is None else self._models.get(span.adapter_id)
        return _BASE if model is None or model.flops is None else model.flops


class SharedState:
    """The state that all samplers of a rank share. Caches of drafts use the cache's budget."""

    def __init__(
        self,
        base: BaseModel,
        models: ModelRegistry,
        limits: ModelLimits,
        config: WorkerConfig,
        mesh: Mesh | None = None,
    ) -> None:
        """Without a mesh there is one rank."""
        self.base, self.models, self.limits, self.config = base, models, limits, config
        self.mesh = mesh or Mesh()
        self.cache = KVCache.of(base, config)
        self.weight_versions = WeightVersions(models)
        self.text = LazyTokenizer(config.model.source, base)
        self.flops = SampledFlops(base, models)
        with_drafts = plugin_rows("workers.drafts.rows", "PROPOSERS").get("drafts")
        self.new_proposer: NewProposer | None = with_drafts(base, models, self.cache.budget) if with_drafts else None

"""The native sampler: continuous batching of sampling requests on the base model that is also trained.

Every iteration runs one packed row: the next token of every sequence that decodes, and a bounded number of prompt
tokens, so that long prompts do not delay decoding. The samples of a prompt share its prefill, and a sequence with a
cached prefix starts after it. Noise is counter-based: a preempted sequence that is prefilled again gets the same
tokens.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ..batch.validated import ModelLimits
from ..heads import LogprobHead
from ..models.model import BaseModel
from ..parallel.mesh import Mesh
from ..protocol.calls import Failure, SamplingSlice, SliceResult
from ..protocol.plugins import plugin_rows
from ..protocol.worker_config import WorkerConfig
from ..registry.model_registry import ModelRegistry
from .active_jobs import ActiveJobs
from .cache.cache import KVCache
from .decoding.rank_sync import RankSync
from .recorder import TokenRecorder
from .requests.lazy_tokenizer import LazyTokenizer
from .runner import ModelRunner
from .sampled_flops import SampledFlops
from .scheduler import KVCacheFull, SequenceScheduler
from .slice_models import SliceModels
from .slots import SequenceSlots, WeightVersions
from .speculation import NewProposer, Proposer


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
        new_proposer = with_drafts(base, models, cache.budget) if with_drafts else lambda head, ranks: Proposer()
        text = LazyTokenizer(config.model.source, base)
        return cls(cache, new_proposer, WeightVersions(models), text, SampledFlops(base, models))


class NativeSampler:
    """Samples on one rank: `slice` works on its jobs; between slices they can only be parked, failed or forgotten."""

    def __init__(
        self,
        base: BaseModel,
        models: ModelRegistry,
        limits: ModelLimits,
        config: WorkerConfig,
        mesh: Mesh | None = None,
        shared: SharedState | None = None,
    ) -> None:
        """Builds a sampler without jobs.

        Args:
            mesh: None if there is one rank.
            shared: None if there are no other samplers.
        """
        shared = shared or SharedState.of(base, models, config)
        self._base, self._registry = base, models
        self._ranks = ranks = RankSync(mesh or Mesh())
        head = LogprobHead(base, config.head_chunk_tokens)
        self._proposer = proposer = shared.new_proposer(head, ranks)
        slots = SequenceSlots(shared.cache, proposer, shared.weight_versions)
        self._scheduler = SequenceScheduler(slots, proposer, config, base)
        self._jobs = ActiveJobs(self._scheduler, limits, shared.text, ranks.is_leader)
        self._models = SliceModels(models, config, self._jobs, self._scheduler, proposer, ranks)
        self._runner = ModelRunner(base, models, limits, config, head, proposer, ranks, shared.cache)
        self._recorder = TokenRecorder(self._scheduler, self._jobs, proposer, ranks, shared.flops)

    def slice(self, work: SamplingSlice) -> SliceResult:
        """Adds and cancels jobs, and samples until the time budget is spent. Cancelled jobs get no result.

        May exceed the budget by one iteration, and by the time that gathering the layers takes.
        """
        deadline = time.monotonic() + work.budget_milliseconds / 1000
        self._jobs.finished = {}
        for job_id in work.cancel:
            self._jobs.remove(job_id)
        for spec in work.join:
            self._jobs.join(spec)
        self._jobs.fail_dropped(self._registry)
        try:
            self._run_until(deadline)
        except Exception:
            # A step or a resize of the cache may be half done: the caller fails all jobs, so forget them here too.
            self.forget_all()
            raise
        if not self._ranks.is_leader:
            return SliceResult({}, 0)
        return SliceResult(self._jobs.finished, len(self._jobs), self._jobs.take_new_parts())

    def fail_all(self, work: SamplingSlice, failure: Failure) -> SliceResult:
        """Fails all jobs of the slice, in place of `slice`."""
        active = [job.spec.job_id for job in self._jobs]
        failed = {*active, *(spec.job_id for spec in work.join)}.difference(work.cancel)
        for job_id in active:
            self._jobs.remove(job_id)
        return SliceResult(dict.fromkeys(failed, failure) if self._ranks.is_leader else {}, 0)

    def forget_all(self) -> None:
        """Forgets jobs and cached prefixes. The jobs get no result."""
        self._jobs.clear()
        self._scheduler.clear()
        self._runner.forget()
        self._recorder.forget()

    def park(self) -> None:
        """Frees the cache slots of its jobs, which continue at the next slice."""
        self._scheduler.preempt_all()
        self._runner.forget()

    def forget_plan(self) -> None:
        """Drops tensors derived from the current weights; the next step rebuilds them."""
        self._runner.forget_plan()

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def cache_bytes(self) -> int:
        """Returns the used part of the budget: used slots, free slots and prefixes, with those of drafts."""
        return self._scheduler.slots.cache.budget.used_bytes()

    def held_bytes(self) -> int:
        return self._scheduler.slots.cache.budget.held_bytes()

    @torch.no_grad()
    def _run_until(self, deadline: float) -> None:
        with ExitStack() as held:
            self._models.load(held)
            held.enter_context(self._base.threads.restored())
            began = time.monotonic()
            held.enter_context(self._base.gathered())
            deadline += time.monotonic() - began  # else gathering could leave little time for steps
            while not self._scheduler.is_idle:
                has_run = self._step()
                if self._ranks.is_over(deadline) or not has_run:
                    break
            self._recorder.write_back()
        if not self._scheduler.table.num_lines:
            # The plan and the batch keep adapters and jobs alive.
            self._scheduler.forget_tensors()
            self._runner.forget()

    def _step(self) -> bool:
        """Returns False if nothing could run, as when other samplers fill the cache."""
        try:
            batch = self._scheduler.schedule()
        except KVCacheFull as error:
            self._jobs.fail(error.sequence.job.spec.job_id, error.message, error.category)
            return True
        if batch.num_tokens:
            self._recorder.update(batch, self._runner.run(batch))
        return batch.num_tokens > 0

"""The sampling engine: continuous batching of sampling requests on the base model that is also trained.

Every step runs one packed row: the next token of every sequence that decodes, and a bounded number of prompt tokens, so
that long prompts do not delay decoding. The samples of a prompt share its prefill, and a sequence with a cached prefix
starts after it. Noise is counter-based: a preempted sequence that is prefilled again gets the same tokens.
"""

import time
from contextlib import ExitStack
from itertools import islice

import torch

from ...schemas.errors import OperationError
from ..heads import LogprobHead
from ..protocol.calls import Failure, SamplingSlice, SliceResult
from ..state.vectors import FORWARD_VECTORS
from .active_jobs import ActiveJobs
from .rank_sync import RankSync
from .runner import ModelRunner
from .scheduler import KVCacheFull, SequenceScheduler
from .shared_state import SharedState
from .slots import SequenceSlots


class SamplingEngine:
    """Samples on one rank: `slice` works on its jobs; between slices they can only be parked, failed or forgotten."""

    def __init__(self, shared: SharedState) -> None:
        """Builds a sampler without jobs."""
        self._base, self._models, self._config = shared.base, shared.models, shared.config
        self._ranks = RankSync(shared.mesh)
        head = LogprobHead(shared.base, shared.config.head_chunk_tokens)
        self._proposer = shared.new_proposer(head, self._ranks) if shared.new_proposer else None
        slots = SequenceSlots(shared.cache, self._proposer, shared.weight_versions)
        self._scheduler = SequenceScheduler(slots, shared.config, shared.base)
        self._jobs = ActiveJobs(shared, self._scheduler, self._ranks)
        self._runner = ModelRunner(shared, head, self._proposer, self._ranks)

    def slice(self, work: SamplingSlice) -> SliceResult:
        """Adds and cancels jobs, and samples until the time budget is spent. Cancelled jobs get no result.

        May exceed the budget by one step, and by the time that gathering the layers takes.
        """
        deadline = time.monotonic() + work.budget_milliseconds / 1000
        self._jobs.finished = {}
        for job_id in work.cancel:
            self._jobs.remove(job_id)
        for spec in work.join:
            self._jobs.join(spec)
        self._jobs.fail_dropped(self._models)
        try:
            self._run_until(deadline)
        except Exception:
            # A step or a resize of the cache may be half done: the caller fails all jobs, so forget them here too.
            self.forget_all()
            raise
        if not self._ranks.is_leader:
            return SliceResult({}, 0)
        return SliceResult(self._jobs.finished, len(self._jobs), self._jobs.take_new_parts())

    def step(self) -> bool:
        """Runs one pass. Returns False if nothing could run, as when other samplers fill the cache."""
        try:
            batch = self._scheduler.schedule()
        except KVCacheFull as error:
            self._jobs.fail(error.sequence.job.spec.job_id, error.message, error.category)
            return True
        if batch.num_tokens:
            self._jobs.update(batch, self._runner.run(batch))
        return batch.num_tokens > 0

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

    def park(self) -> None:
        """Frees the cache slots of its jobs, which continue at the next slice."""
        self._scheduler.preempt_all()
        self._runner.forget()

    def forget_tensors(self) -> None:
        """Drops tensors derived from the current weights; the next step rebuilds them."""
        self._runner.forget()

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
            self._load_models(held)
            held.enter_context(self._base.threads.restored())
            began = time.monotonic()
            held.enter_context(self._base.weights.gathered())
            deadline += time.monotonic() - began  # else gathering could leave little time for steps
            while not self._scheduler.is_idle:
                has_run = self.step()
                if self._ranks.is_over(deadline) or not has_run:
                    break
            if self._scheduler.batch is not None:
                self._jobs.write_back(self._scheduler.batch)
        if not self._scheduler.table.num_lines:
            # The plan and the batch keep adapters and jobs alive.
            self._scheduler.forget_tensors()
            self._runner.forget()

    # The models of a slice

    def _load_models(self, held: ExitStack) -> None:
        """Holds the slice's models on the device until `held` closes, the same on all ranks that decode together.

        An adapter that does not load fails its jobs; without its draft, on any rank, a sequence continues.
        """
        # As many adapters as the device holds: those of running sequences first, then those of waiting jobs.
        admitted = [sequence.job for sequence in self._scheduler.admitted()]
        wanted = dict.fromkeys(job.adapter_id for job in (*admitted, *self._jobs))
        chosen = list(islice((one for one in wanted if one is not None), self._config.adapter_slots))
        adapter_ids, drafts = self._load_adapters(chosen, held), self._load_drafts(held)
        missing = {draft_id for draft_id, is_loaded in drafts.items() if not is_loaded}
        for failures, missing_there in reversed(self._ranks.gathered((self._jobs.failures, missing))):
            for job_id, failure in failures.items():
                self._jobs.fail(job_id, failure.message, failure.category)
            missing |= missing_there
        self._scheduler.serve(adapter_ids, drafts.keys() - missing)

    def _load_adapters(self, adapter_ids: list[str], held: ExitStack) -> list[str]:
        """Loads the adapters to the device and returns those loaded; one that does not load fails its jobs."""
        try:
            held.enter_context(self._models.resident(adapter_ids, FORWARD_VECTORS))
            return adapter_ids
        except OperationError as error:
            if len(adapter_ids) == 1:
                self._jobs.fail_adapter(adapter_ids[0], error)
                return []
        return [loaded for each in adapter_ids for loaded in self._load_adapters([each], held)]

    def _load_drafts(self, held: ExitStack) -> dict[str, bool]:
        """Loads the drafts of this slice, as many as the device holds. Returns which of them loaded."""
        if self._proposer is None:
            return {}
        users = [sequence.job for sequence in self._scheduler.with_drafts()]
        users += [job for job in self._jobs if any(map(self._scheduler.may_start_drafting, job.sequences))]
        return self._proposer.load((job.spec.draft_id for job in users), self._config.full_slots, held)

"""Runs one sampler for the base model with all its adapters, and one for each fully trained model."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from torch import Tensor

from ...schemas.errors import OperationError
from ..protocol.calls import Failure, SampleJob, SamplingSlice, SliceResult
from ..state.vectors import FORWARD_VECTORS
from .engine import SamplingEngine
from .shared_state import SharedState


@dataclass
class ModelSampler:
    """The sampler of a fully trained model, and the jobs and cancellations for its next turn."""

    engine: SamplingEngine
    join: list[SampleJob] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)

    def take(self, milliseconds: float) -> SamplingSlice:
        """Returns the jobs and cancellations as a slice, and clears them."""
        joining = tuple(spec for spec in self.join if spec.job_id not in self.cancel)
        work = SamplingSlice(joining, tuple(self.cancel), milliseconds)
        self.join, self.cancel = [], []
        return work

    @property
    def num_jobs(self) -> int:
        return self.engine.num_jobs + len(self.join)


class MultiModelSampler:
    """The samplers of one rank, which share the KV cache. Within a slice they take turns of equal time."""

    def __init__(self, shared: SharedState) -> None:
        """Builds the samplers without jobs."""
        self._shared, self._models, self._mesh = shared, shared.models, shared.mesh
        # Samplers of cohorts other than the first.
        self._other_cohorts: dict[int, MultiModelSampler] = {}
        self._of_base = SamplingEngine(shared)
        self._of_models: dict[str, ModelSampler] = {}
        # Fully trained models that have jobs and had a turn, the most recent last; the same on all ranks.
        self._had_turns: list[str] = []

    def slice(self, work: SamplingSlice) -> SliceResult:
        """Like SamplingEngine.slice. May exceed its budget by one step of each sampler and the loading of
        weights.
        """
        try:
            return self._slice_apart(work) if work.cohort else self._slice(work)
        except Exception:
            # The caller fails all jobs, so forget them here too.
            self.forget_all()
            raise

    def _slice_apart(self, work: SamplingSlice) -> SliceResult:
        """Runs a cohort other than the first; the other such cohorts give up their cache slots meanwhile."""
        if work.cohort not in self._other_cohorts:
            self._other_cohorts[work.cohort] = MultiModelSampler(self._shared)
        for number, sampler in self._other_cohorts.items():
            if number != work.cohort:
                sampler.park()
        result = self._other_cohorts[work.cohort].slice(replace(work, cohort=0))
        if not self._other_cohorts[work.cohort].has_jobs:
            del self._other_cohorts[work.cohort]
        return result

    @property
    def has_jobs(self) -> bool:
        return bool(self._of_base.num_jobs or self._of_models)

    def _slice(self, work: SamplingSlice) -> SliceResult:
        self._take_in(work)
        turns = self._turns(work)
        return self._of_base.slice(work) if turns == [None] else self._slice_in_turn(work, turns)

    def _take_in(self, work: SamplingSlice) -> None:
        """Stores what concerns fully trained models until their turn."""
        for spec in work.join:
            if spec.adapter_id is not None and self._models.is_exclusive(spec.adapter_id):
                self._add_sampler(spec.adapter_id)
        for model_id, sampler in self._of_models.items():
            sampler.join += (spec for spec in work.join if spec.adapter_id == model_id)
            sampler.cancel += work.cancel

    def _slice_in_turn(self, work: SamplingSlice, turns: Sequence[str | None]) -> SliceResult:
        part, result = work.budget_milliseconds / len(turns), SliceResult({}, 0)
        for model_id in turns:
            if model_id is None:
                others = tuple(spec for spec in work.join if spec.adapter_id not in self._of_models)
                found = self._of_base.slice(SamplingSlice(others, work.cancel, part))
            else:
                found = self._slice_of(model_id, part)
            result = _joined(result, found)
        for model_id in turns:
            if model_id is not None and not self._of_models[model_id].num_jobs:
                del self._of_models[model_id]
        num_waiting = sum(sampler.num_jobs for model_id, sampler in self._of_models.items() if model_id not in turns)
        return replace(result, num_active=result.num_active + num_waiting)

    def _slice_of(self, model_id: str, milliseconds: float) -> SliceResult:
        engine, work = self._of_models[model_id].engine, self._of_models[model_id].take(milliseconds)
        if model_id not in self._models:
            return engine.slice(work)  # which fails its jobs: the model was dropped
        own = None
        with ExitStack() as held:
            try:
                held.enter_context(self._models.resident([model_id], FORWARD_VECTORS))
            except OperationError as error:
                own = Failure.of(error)
            [failure] = self._mesh.first_values([own])  # of the first rank that cannot load the model
            if failure is not None:
                return engine.fail_all(work, failure)
            with self._models.with_weights_of([self._models.get(model_id)]):
                return engine.slice(work)

    def park(self) -> None:
        for engine in self._engines():
            engine.park()

    def forget_all(self) -> None:
        self._other_cohorts.clear()
        self._of_base.forget_all()
        self._of_models.clear()
        self._had_turns = []

    def take_flops(self) -> float:
        """Returns the operations that all samplers of the rank needed since the last call."""
        return self._shared.flops.take()

    def cache_bytes(self) -> int:
        """Returns the used part of the budget: used slots, free slots and prefixes, with those of drafts."""
        return self._shared.cache.budget.used_bytes()

    def draft_cache_bytes(self) -> int:
        return self.cache_bytes() - self._shared.cache.num_bytes()

    def held_bytes(self) -> int:
        return self._shared.cache.budget.held_bytes()

    def offloadable_tensors(self) -> Iterator[Tensor]:
        """Returns the cache's tensors, for offloading, after dropping what can be rebuilt."""
        self._forget_tensors()
        return self._shared.cache.budget.tensors()

    def _forget_tensors(self) -> None:
        for engine in self._engines():
            engine.forget_tensors()
        for apart in self._other_cohorts.values():
            apart._forget_tensors()

    def _turns(self, work: SamplingSlice) -> list[str | None]:
        """Returns the samplers that run in this slice, the same on all ranks; None stands for the base model.

        Of the fully trained models as many run as the device holds, those first that have waited longest.
        """
        if not (self._models.has_full or self._had_turns):
            return [None]
        joining = any(spec.adapter_id not in self._of_models for spec in work.join)
        of_ranks = self._mesh.all_gather_object((bool(self._of_base.num_jobs) or joining, list(self._of_models)))
        wanted = {model_id for _, of_rank in of_ranks for model_id in of_rank}
        self._had_turns = [model_id for model_id in self._had_turns if model_id in wanted]
        turns = [*sorted(wanted.difference(self._had_turns)), *self._had_turns][: self._shared.config.full_slots]
        self._had_turns = [*(each for each in self._had_turns if each not in turns), *turns]
        for model_id in turns:
            self._add_sampler(model_id)
        return [*([None] if any(of_base for of_base, _ in of_ranks) or not turns else []), *turns]

    def _engines(self) -> list[SamplingEngine]:
        return [self._of_base, *(sampler.engine for sampler in self._of_models.values())]

    def _add_sampler(self, model_id: str) -> None:
        if model_id not in self._of_models:
            self._of_models[model_id] = ModelSampler(SamplingEngine(self._shared))


def _joined(one: SliceResult, other: SliceResult) -> SliceResult:
    return SliceResult(one.finished | other.finished, one.num_active + other.num_active, one.progress | other.progress)

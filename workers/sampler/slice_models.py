"""Loads the adapters and drafts of a slice to the device."""

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import islice

from ...schemas.errors import OperationError
from ..protocol.worker_config import WorkerConfig
from ..registry.model_registry import ModelRegistry
from ..state.vectors import FORWARD_VECTORS
from .active_jobs import ActiveJobs
from .decoding.rank_sync import RankFailures, RankSync
from .requests.jobs import SequenceState
from .scheduler import SequenceScheduler
from .speculation import Proposer


class SliceModels:
    """Decides which models a slice has on the device, the same on all ranks that decode together."""

    def __init__(
        self,
        models: ModelRegistry,
        config: WorkerConfig,
        jobs: ActiveJobs,
        scheduler: SequenceScheduler,
        proposer: Proposer,
        ranks: RankSync,
    ) -> None:
        self._models, self._config, self._ranks = models, config, ranks
        self._jobs, self._scheduler, self._proposer = jobs, scheduler, proposer

    def load(self, held: ExitStack) -> None:
        """Holds the slice's models on the device until `held` closes. The scheduler then admits only their sequences.

        An adapter that does not load fails its jobs; without its draft a sequence continues.
        """
        self._scheduler.serve(self._load_adapters(self._choose_adapters(), held))
        self._agree(self._load_drafts(held))

    def _choose_adapters(self) -> list[str]:
        """Returns the adapters of this slice, as many as the device holds.

        Those of running sequences first, then those of waiting jobs in order of arrival.
        """
        under_way = [sequence.job for sequence in self._scheduler.admitted()]
        wanted = dict.fromkeys(job.adapter_id for job in (*under_way, *self._jobs))
        return list(islice((one for one in wanted if one is not None), self._config.adapter_slots))

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
        users = [*self._scheduler.with_drafts(), *self._draft_candidates()]
        wanted = (sequence.job.spec.draft_id for sequence in users)
        return self._proposer.load(wanted, self._config.full_slots, held)

    def _draft_candidates(self) -> list[SequenceState]:
        """Returns one sequence of each job that a draft may serve, if the job has one."""
        of_jobs = (next(filter(self._may_start_drafting, job.sequences), None) for job in self._jobs)
        return [sequence for sequence in of_jobs if sequence is not None]

    def _may_start_drafting(self, sequence: SequenceState) -> bool:
        return self._scheduler.is_pending(sequence) and sequence.may_use_draft

    def _agree(self, drafts: Mapping[str, bool]) -> None:
        """Merges failures over the ranks that decode together.

        Sequences whose draft did not load on every rank continue without it.
        """
        missing = frozenset(draft_id for draft_id, is_loaded in drafts.items() if not is_loaded)
        merged = self._ranks.merge_failures(RankFailures(self._jobs.failures, missing))
        for job_id, failure in merged.failures.items():
            self._jobs.fail(job_id, failure.message, failure.category)
        self._proposer.serve([draft_id for draft_id in drafts if draft_id not in merged.missing_drafts])
        for sequence in self._scheduler.with_drafts():
            if not self._proposer.is_ready(sequence):
                self._scheduler.stop_drafting(sequence)

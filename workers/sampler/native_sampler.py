"""The native sampler: continuous batching of sampling requests on the base model that is also trained.

Every iteration runs one packed row: the next token of every sequence that decodes, and a bounded number of prompt
tokens, so that long prompts do not delay decoding. The samples of a prompt share its prefill, and a sequence with a
cached prefix starts after it. Noise is counter-based: a preempted sequence that is prefilled again gets the same
tokens.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from ..batch.validated import ModelLimits
from ..heads import LogprobHead
from ..models.model import BaseModel
from ..parallel.mesh import Mesh
from ..protocol.calls import Failure, SamplingSlice, SliceResult
from ..protocol.worker_config import WorkerConfig
from ..registry.model_registry import ModelRegistry
from .active_jobs import ActiveJobs
from .decoding.batch import Batch, DecodeBatch, DraftTokensPart, PrefillChunk
from .decoding.decode_loop import DecodeLoop
from .decoding.decode_rows import DecodeRows
from .decoding.rank_sync import RankSync
from .decoding.sampling_batch import SamplingBatch
from .decoding.step_graph import StepGraphs
from .draft_verifier import DraftVerifier
from .model_runner import ModelRunner, PassOutput
from .requests.jobs import SequenceState
from .requests.sequence_table import SequenceTable
from .sequence_scheduler import KVCacheFull, SequenceScheduler
from .sequence_slots import SequenceSlots
from .shared_state import SharedState
from .slice_models import SliceModels
from .token_recorder import TokenRecorder


class NativeSampler:
    """Samples on one rank: `slice` works on its jobs; between slices they can only be parked, failed or forgotten.

    graphs: captures decode steps; None if they are not captured.
    """

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
        head = LogprobHead(base, config.head_chunk_tokens)
        self._base, self._registry, self._limits, self._config = base, models, limits, config
        mesh = mesh or Mesh()
        self._ranks = RankSync(mesh)
        # Exchanges between ranks are not captured.
        is_captured = base.device.type == "cuda" and not mesh.has_forward_collectives
        self.graphs = StepGraphs(base.device) if is_captured else None
        self._proposer = shared.new_proposer(head, self._ranks)
        slots = SequenceSlots(shared.cache, self._proposer, shared.weight_versions)
        self._scheduler = SequenceScheduler(slots, self._proposer, config, base)
        self._jobs = ActiveJobs(self._scheduler, limits, shared.text, self._ranks.is_leader)
        self._models = SliceModels(models, config, self._jobs, self._scheduler, self._proposer, self._ranks)
        self._runner = ModelRunner(base, models, head, self._ranks, shared.cache)
        self._recorder = TokenRecorder(self._scheduler, self._jobs, self._ranks)
        self._flops = shared.flops
        self._verifier = DraftVerifier(
            self._scheduler, self._proposer, self._runner, self._recorder, self._ranks, self._flops
        )
        self._sampling: SamplingBatch | None = None
        self._loop: DecodeLoop | None = None
        self._rows: DecodeRows | None = None

    def slice(self, work: SamplingSlice) -> SliceResult:
        """Adds and cancels jobs, and samples until the time budget is spent. Cancelled jobs get no result.

        May exceed the budget by one iteration, and by the time that gathering the layers takes.
        """
        deadline = time.monotonic() + work.budget_milliseconds / 1000
        self._jobs.start_slice()
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
        self._forget_tensors()

    def park(self) -> None:
        """Frees the cache slots of its jobs, which continue at the next slice."""
        self._scheduler.preempt_all()
        self._forget_tensors()

    def forget_plan(self) -> None:
        """Drops tensors derived from the current weights; the next step rebuilds them."""
        self._runner.forget_plan()
        self._loop = self._rows = None

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def cache_bytes(self) -> int:
        """Returns the used part of the budget: used slots, free slots and prefixes, with those of drafts."""
        return self._scheduler.slots.cache.budget.used_bytes()

    def held_bytes(self) -> int:
        """Returns the bytes of the slots in use."""
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
                has_run = self._iterate(deadline)
                if self._ranks.is_over(deadline) or not has_run:
                    break
        if not self._scheduler.table.num_lines:
            # The table may have grown for one long sample; the plan and the batch keep adapters and jobs alive.
            self._scheduler.table = SequenceTable()
            self._forget_tensors()

    def _iterate(self, deadline: float) -> bool:
        """Runs one iteration. Returns False if nothing could run, as when other samplers fill the cache."""
        try:
            self._scheduler.make_room_for_drafts()
            proposed = self._proposer.propose(self._scheduler.with_drafts(), self._scheduler.table)
            batch = self._scheduler.next_batch(proposed)
        except KVCacheFull as error:
            self._jobs.fail(error.sequence.job.spec.job_id, error.message, error.category)
            return True
        if batch.decoding is not None and not batch.parts:
            self._decode(batch.decoding, deadline)
        elif batch.num_tokens:
            captured = self._proposer.captured([part.sequence for part in batch.parts])
            self._flops.add_batch(batch, self._scheduler.table)
            output = self._runner.run(batch, self._scheduler.table, captured)
            self._extend(batch, output)
            self._verifier.verify(batch, proposed, output)
        return batch.num_tokens > 0

    def _decode(self, decoding: DecodeBatch, deadline: float) -> None:
        """Runs decode steps until a sequence ends or may outgrow its slot."""
        if self._sampling is None or self._sampling.sequences is not decoding.sequences:
            self._sampling = self._sampling_batch(decoding.sequences)
        loop, self._loop = self._loop, None
        if loop is None or not loop.continues(decoding):
            rows = self._rows_for(decoding)
            loop = DecodeLoop(decoding, self._sampling, self._scheduler.table, self._base.device, rows)
        num_run, num_steps = self._scheduler.table.length[self._sampling.lines] - 1, 0
        rows = loop.rows
        with self._runner.applied(rows.adapter_spans, len(rows.tokens), rows.plan) as rows.plan:
            while True:
                sampled = self._runner.decode_step(loop)
                num_steps += 1
                has_more = loop.accept(sampled.chosen)
                if not has_more or self._ranks.is_over(deadline):
                    break
        loop.write_back()
        self._flops.add_steps(self._sampling.adapter_spans, num_run, num_steps)
        if not has_more:
            self._recorder.append(sampled)
        else:
            self._loop = loop

    def _rows_for(self, decoding: DecodeBatch) -> DecodeRows:
        if self._rows is None or not self._rows.give_to(decoding, self._scheduler.table):
            self._rows = None  # frees the memory of its graph
            self._rows = DecodeRows(decoding, self._scheduler.table, self._base.device, self.graphs)
        return self._rows

    def _extend(self, batch: Batch, output: PassOutput) -> None:
        """Samples the next token of every sequence whose known tokens have all run, except those with draft tokens."""
        sequences = list(batch.decoding.sequences) if batch.decoding is not None else []
        last = list(range(len(sequences)))
        for start, part in zip(batch.starts(), batch.parts, strict=True):
            if isinstance(part, DraftTokensPart):
                continue
            self._end_chunk(part, start, output)
            if part.is_last and part.prefill.samples_next:
                sequences += part.prefill.sequences
                last += [start + part.length - 1] * len(part.prefill.sequences)
        if sequences:
            sampling = self._sampling_batch(sequences)
            self._flops.add_scored(sampling.adapter_spans)
            hidden = output.hidden[self._runner.tensor(last)]
            self._recorder.append(self._runner.sample(sampling, hidden, sampling.noise()))

    def _end_chunk(self, part: PrefillChunk, start: int, output: PassOutput) -> None:
        """Records that a part of a prompt has run.

        A prompt is scored once per job: later samples may be prefilled separately or again.

        Args:
            start: the index of its first token in the packed row.
        """
        rows, prefill = slice(start, start + part.length), part.prefill
        if part.cached and part.sequence.needs_cache and self._proposer.uses_draft(part.sequence):
            self._proposer.observe(part.sequence, part.start, rows, output.captured, prefill.tokens)
        if (scores := prefill.job.scores) is not None:
            logits_of = self._runner.logits_with(prefill.job.adapter_id)
            scores.score(part.start, output.hidden[rows], logits_of, self._config.head_chunk_tokens)
        prefill.computed = part.stop
        self._scheduler.slots.store_chunk(part)
        if part.is_last:
            self._scheduler.end_prefill(prefill)

    def _sampling_batch(self, sequences: Sequence[SequenceState]) -> SamplingBatch:
        return SamplingBatch(sequences, self._scheduler.table, self._limits.vocab_size, self._base.device)

    def _forget_tensors(self) -> None:
        self._runner.forget_plan()
        self._sampling = self._loop = self._rows = None

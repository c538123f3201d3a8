"""The native engine: continuous batching of sampling requests on the base model that is also trained.

Every iteration runs one packed sequence: the next token of every sequence that decodes, and a bounded number of prompt
tokens, so that long prompts do not delay decoding. The samples of a prompt share its prefill, and a sequence with a
cached prefix starts after it. Noise is counter-based: a preempted sequence that is prefilled again gets the same
tokens.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ...schemas.errors import Category, OperationError
from ...schemas.sampling import SampleResponse
from ..batch.validated import ModelLimits
from ..heads import LogprobHead
from ..lora import Adapter, BatchPlan, Segment
from ..models.model import BaseModel
from ..parallel.mesh import Mesh
from ..protocol.calls import Failure, SampledPart, SampleJob, SamplingSlice, SliceResult
from ..protocol.worker_config import WorkerConfig
from ..registry.model_registry import ModelRegistry
from ..state.vectors import FORWARD_VECTORS
from .cache.cache import KVCache
from .cache.draft_caches import DraftCaches
from .cache.weight_versions import WeightVersions
from .decoding.batch import AdapterRun, Batch, DecodeBatch, DraftTokensPart, PrefillChunk, runs_of
from .decoding.decode_loop import DecodeLoop
from .decoding.sampling_batch import SamplingBatch
from .logits.noise import uniforms
from .logits.token_choice import ChosenTokens, SamplingTensors, choose, logprobs_of, probabilities
from .rank_sync import RankFailures, RankSync, VerifyResult
from .requests.jobs import NOWHERE, Job, SequenceState, check_request
from .requests.lazy_tokenizer import LazyTokenizer
from .requests.prompt_scores import top_logprobs
from .requests.sequence_table import EndReason, SequenceTable
from .scheduler import KVCacheFull, SequenceScheduler
from .speculation import DraftTokens, SpeculativeDecoder, may_use_draft, verify


@dataclass(frozen=True)
class SampledBatch:
    """Holds the next token of each sequence of a sampling batch. logits: the model's, float32, [rows, vocab]."""

    drawing: SamplingBatch
    logits: Tensor
    chosen: ChosenTokens


@dataclass(frozen=True)
class AcceptedTokens:
    """The next tokens of a sequence after verifying draft tokens.

    tokens: int64, [n].
    logits: the model's, by which they were sampled, float32, [n, vocab].
    """

    row: SequenceState
    tokens: np.ndarray
    logits: Tensor


class NativeSampler:
    """Samples on one rank. Only `slice` changes its state: jobs and cached prefixes."""

    def __init__(
        self,
        base: BaseModel,
        models: ModelRegistry,
        limits: ModelLimits,
        config: WorkerConfig,
        mesh: Mesh | None = None,
        cache: KVCache | None = None,
        namespaces: WeightVersions | None = None,
        text: LazyTokenizer | None = None,
        draft_caches: DraftCaches | None = None,
    ) -> None:
        """mesh: None if there is one rank.
        cache, namespaces, text, draft_caches: None if no other sampler shares them. The draft caches use the cache's
            budget.
        """
        self._base = base
        self._together = RankSync(mesh or Mesh())
        self._models = models
        self._head = LogprobHead(base, config.head_chunk_tokens)
        self._config = config
        self._limits = limits
        cache, namespaces = cache or KVCache.of(base, config), namespaces or WeightVersions(models)
        draft_caches = draft_caches or DraftCaches(base, cache.budget)
        self._speculation = SpeculativeDecoder(base, models, self._head, self._together, draft_caches)
        threads = base.threads.most
        self._schedule = SequenceScheduler(cache, namespaces, config, base.device, threads, self._speculation)
        self._captured: dict[int, Tensor] = {}
        self._jobs: dict[str, Job] = {}
        self._num_joined = 0
        self._drawing: SamplingBatch | None = None
        self._plan: BatchPlan | None = None
        self._finished: dict[str, SampleResponse | Failure] = {}
        self._text = text or LazyTokenizer(config.model.source, base)

    def slice(self, work: SamplingSlice) -> SliceResult:
        """Adds and cancels jobs, and samples until the time budget is spent. Cancelled jobs get no result.

        May exceed the budget by one iteration, and by the time that gathering the layers takes.
        """
        deadline = time.monotonic() + work.budget_milliseconds / 1000
        self._finished = {}
        for job_id in work.cancel:
            self._remove(job_id)
        for request in work.join:
            self._join(request)
        self._fail_dropped()
        try:
            self._run_until(deadline)
        except Exception:
            # A step or a resize of the cache may be half done: the caller fails all jobs, so forget them here too.
            self.forget_all()
            raise
        if not self._together.is_leader:
            return SliceResult({}, 0)
        return SliceResult(self._finished, len(self._jobs), self._progress())

    def fail_all(self, work: SamplingSlice, failure: Failure) -> SliceResult:
        """Fails all jobs of the slice, in place of `slice`."""
        jobs = {*self._jobs, *(request.job_id for request in work.join)}.difference(work.cancel)
        for job_id in list(self._jobs):
            self._remove(job_id)
        return SliceResult(dict.fromkeys(jobs, failure) if self._together.is_leader else {}, 0)

    def forget_all(self) -> None:
        """Forgets jobs and cached prefixes. The jobs get no result."""
        self._jobs.clear()
        self._schedule.clear()
        self._drawing = self._plan = None

    def park(self) -> None:
        """Frees the cache slots of its jobs, which continue at the next slice."""
        self._schedule.preempt_all()
        self._drawing = self._plan = None

    def forget_plan(self) -> None:
        """Drops tensors derived from the current weights; the next step rebuilds them."""
        self._plan = None

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    def cache_bytes(self) -> int:
        """Returns the used part of the budget: used slots, free slots and prefixes, with those of drafts."""
        return self._schedule.cache.budget.used_bytes()

    def held_bytes(self) -> int:
        """Returns the bytes of the slots in use."""
        return self._schedule.cache.budget.held_bytes()

    def _progress(self) -> dict[str, tuple[SampledPart, ...]]:
        streaming = {job_id: job for job_id, job in self._jobs.items() if job.request.streams}
        for job in streaming.values():
            for row in job.sequences:
                if row.table_row != NOWHERE:
                    self._schedule.table.copy_to(row)
        untold = {job_id: job.take_new_parts() for job_id, job in streaming.items()}
        return {job_id: parts for job_id, parts in untold.items() if parts}

    @torch.no_grad()
    def _run_until(self, deadline: float) -> None:
        with ExitStack() as held:
            self._schedule.serve(self._load_adapters(self._choose_adapters(), held))
            self._agree(self._load_drafts(held))
            held.enter_context(self._base.threads.restored())
            began = time.monotonic()
            held.enter_context(self._base.gathered())
            deadline += time.monotonic() - began  # else gathering could leave little time for steps
            while not self._schedule.is_idle:
                has_run = self._iterate(deadline)
                if self._together.is_over(deadline) or not has_run:
                    break
        if not self._schedule.table.num_lines:
            # The table may have grown for one long sample; the plan and the batch keep adapters and jobs alive.
            self._schedule.table, self._plan, self._drawing = SequenceTable(), None, None

    def _iterate(self, deadline: float) -> bool:
        """Runs one iteration. Returns False if nothing could run, as when other samplers fill the cache."""
        try:
            self._schedule.make_room_for_drafts()
            guesses = self._speculation.propose(self._schedule.with_drafts(), self._schedule.table)
            batch = self._schedule.next_batch(guesses)
        except KVCacheFull as error:
            self._fail(error.row.job, error.message, error.category)
            return True
        if batch.decoding is not None and not batch.parts:
            self._decode(batch.decoding, deadline)
        elif batch.num_tokens:
            hidden = self._run(batch)
            self._extend(batch, hidden)
            self._verify_drafts(batch, guesses, hidden)
            self._captured = {}
        return batch.num_tokens > 0

    # Jobs and models of a slice

    def _choose_adapters(self) -> list[str]:
        """Returns the adapters of this slice, as many as the device holds.

        Those of running sequences first, then those of waiting jobs in order of arrival.
        """
        under_way = [row.job for row in self._schedule.admitted()]
        wanted = dict.fromkeys(job.adapter_id for job in (*under_way, *self._jobs.values()))
        return list(islice((one for one in wanted if one is not None), self._config.adapter_slots))

    def _load_adapters(self, adapter_ids: list[str], held: ExitStack) -> list[str]:
        """Loads the adapters to the device and returns those loaded; one that does not load fails its jobs."""
        try:
            held.enter_context(self._models.resident(adapter_ids, FORWARD_VECTORS))
            return adapter_ids
        except OperationError as error:
            if len(adapter_ids) == 1:
                self._fail_jobs_of(adapter_ids[0], error)
                return []
        return [brought for each in adapter_ids for brought in self._load_adapters([each], held)]

    def _load_drafts(self, held: ExitStack) -> dict[str, bool]:
        """Loads the drafts of this slice, as many as the device holds. Returns which of them loaded."""
        wanted = dict.fromkeys(
            row.job.request.draft_id for row in [*self._schedule.with_drafts(), *self._draft_candidates()]
        )
        known = [one for one in wanted if one is not None and self._models.is_draft(one)]
        brought = dict.fromkeys(known[: self._config.full_slots], False)
        for draft_id in brought:
            with suppress(OperationError):
                held.enter_context(self._models.resident([draft_id], FORWARD_VECTORS))
                brought[draft_id] = True
        return brought

    def _agree(self, drafts: Mapping[str, bool]) -> None:
        """Merges failures over the ranks that decode together.

        Sequences whose draft did not load on every rank continue without it.
        """
        own = {job_id: answer for job_id, answer in self._finished.items() if isinstance(answer, Failure)}
        lacking = frozenset(draft_id for draft_id, has_come in drafts.items() if not has_come)
        trouble = self._together.merge_failures(RankFailures(own, lacking))
        for job_id, failure in trouble.failures.items():
            if job_id in self._jobs:
                self._fail(self._jobs[job_id], failure.message, failure.category)
        self._speculation.serve([draft_id for draft_id in drafts if draft_id not in trouble.missing_drafts])
        for row in self._schedule.with_drafts():
            if not self._speculation.is_ready(row):
                self._schedule.stop_drafting(row)

    def _draft_candidates(self) -> list[SequenceState]:
        """Returns one sequence of each job that a draft may serve, if the job has one."""
        of_jobs = (next(filter(self._may_come, job.sequences), None) for job in self._jobs.values())
        return [row for row in of_jobs if row is not None]

    def _may_come(self, row: SequenceState) -> bool:
        return self._schedule.is_pending(row) and may_use_draft(row)

    def _join(self, request: SampleJob) -> None:
        assert request.job_id not in self._jobs, f"job {request.job_id} joined twice"
        try:
            check_request(request, self._limits)
            job = Job(request, self._num_joined, self._limits, self._text)
            self._schedule.check(job.sequences[0])
        except OperationError as error:
            self._finished[request.job_id] = Failure(error.message, error.category)
            return
        self._num_joined += 1
        self._jobs[request.job_id] = job
        self._schedule.enqueue(job.sequences)

    def _fail_dropped(self) -> None:
        for job in list(self._jobs.values()):
            if job.adapter_id is not None and job.adapter_id not in self._models:
                self._fail(job, f"adapter {job.adapter_id} is gone: its sampler was closed or never saved")

    def _fail_jobs_of(self, adapter_id: str, error: OperationError) -> None:
        for job in list(self._jobs.values()):
            if job.adapter_id == adapter_id:
                self._fail(job, error.message, error.category)

    def _fail(self, job: Job, message: str, category: Category = "user") -> None:
        self._remove(job.request.job_id)
        self._finished[job.request.job_id] = Failure(message, category)

    def _remove(self, job_id: str) -> None:
        """Frees everything that a job holds. Unknown ids are ignored: the job may just have ended."""
        if job := self._jobs.pop(job_id, None):
            self._schedule.remove(job)

    # An iteration

    def _decode(self, decoding: DecodeBatch, deadline: float) -> None:
        """Runs decode steps until a sequence ends or may outgrow its slot."""
        drawing = self._drawing
        if drawing is None or drawing.rows is not decoding.rows:
            drawing = self._drawing = self._new_drawing(decoding.rows)
        burst = DecodeLoop(decoding, drawing, self._schedule.table, self._base.device)
        self._set_threads(len(decoding.rows))
        with self._models.lora.applied(self._plan_of(drawing.runs)):
            while True:
                hidden = self._base.hidden_states(burst.tokens, burst.positions, burst.packing())
                drawn = self._sample_tokens(drawing, hidden, burst.noise())
                goes_on = drawing.is_plain and burst.num_steps < burst.most_steps and burst.accept(drawn.chosen)
                if not goes_on or self._together.is_over(deadline):
                    break
        burst.write_back()
        if not goes_on:
            self._append(drawn)

    def _run(self, batch: Batch) -> Tensor:
        """Returns the hidden states of the packed sequence, [tokens, hidden]."""
        self._set_threads(batch.num_tokens)
        table = self._schedule.table
        tokens, positions = self._tensor(batch.tokens(table)), self._tensor(batch.positions(table))
        packing = batch.packing(table, self._schedule.cache, self._base.device)
        captured = self._speculation.captured([part.row for part in batch.parts])
        with self._models.lora.applied(self._plan_of(batch.runs())):
            hidden = self._base.hidden_states(tokens, positions, packing, captured=captured)
        self._captured = captured or {}
        return hidden

    def _set_threads(self, num_tokens: int) -> None:
        self._base.threads.set_for(self._base.weights_per_product, num_tokens, self._schedule.cache.values_per_layer())

    def _plan_of(self, runs: Sequence[AdapterRun]) -> BatchPlan:
        segments = self._segments(runs)
        if self._plan is None or not self._plan.is_valid_for(segments):
            self._plan = self._models.lora.plan(segments, self._plan)
        return self._plan

    def _extend(self, batch: Batch, hidden: Tensor) -> None:
        """Samples the next token of every sequence whose known tokens have all run, except those with draft tokens."""
        rows = list(batch.decoding.rows) if batch.decoding is not None else []
        last = list(range(len(rows)))
        for start, part in zip(batch.starts(), batch.parts, strict=True):
            if isinstance(part, DraftTokensPart):
                continue
            self._feed_draft(part, start)
            self._note_computed(part, hidden[start : start + part.length])
            if part.is_last and part.prefill.samples_next:
                rows += part.prefill.sequences
                last += [start + part.length - 1] * len(part.prefill.sequences)
        if rows:
            drawing, table = self._new_drawing(rows), self._schedule.table
            noise = uniforms(table.noise_key[drawing.lines], table.length[drawing.lines])
            self._append(
                self._sample_tokens(drawing, hidden[self._tensor(last)], torch.from_numpy(noise).to(hidden.device))
            )

    def _feed_draft(self, part: PrefillChunk, start: int) -> None:
        if part.cached and part.row.needs_cache and self._speculation.uses_draft(part.row):
            rows = slice(start, start + part.length)
            self._speculation.observe(part.row, part.start, rows, self._captured, part.prefill.sequence)

    def _verify_drafts(self, batch: Batch, guesses: Mapping[SequenceState, DraftTokens], hidden: Tensor) -> None:
        """Verifies draft tokens. Takes the accepted ones, and one token of the model after them."""
        placed = [(start, part) for start, part in zip(batch.starts(), batch.parts, strict=True)]
        # Other sequences of this pass may have ended their jobs.
        placed = [
            (start, part)
            for start, part in placed
            if isinstance(part, DraftTokensPart) and part.row.table_row != NOWHERE
        ]
        if not placed:
            return
        rows = np.concatenate([np.arange(start, start + part.length) for start, part in placed])
        runs = runs_of((part.row.job.adapter_id, part.length) for _, part in placed)
        logits = self._head.logits_of_segments(hidden[self._tensor(rows)], self._segments(runs))
        lines = np.repeat([part.row.table_row for _, part in placed], [part.length for _, part in placed])
        settings = self._schedule.table.settings(lines)
        of_model = probabilities(logits, SamplingTensors.of(settings, self._limits.vocab_size, self._base.device))
        stops = np.cumsum([part.length for _, part in placed]).tolist()
        places = [slice(stop - part.length, stop) for stop, (_, part) in zip(stops, placed, strict=True)]
        own = [self._verify(part.row, guesses, of_model[here]) for (_, part), here in zip(placed, places, strict=True)]
        taken: list[AcceptedTokens] = []
        for (start, part), here, verified in zip(placed, places, self._together.agree_on_verified(own), strict=True):
            taken.append(self._take_guesses(part, start, logits[here], verified))
        self._append_several(taken)
        for row in self._schedule.with_drafts():
            if row.without_draft:
                self._schedule.stop_drafting(row)

    def _verify(
        self, row: SequenceState, guesses: Mapping[SequenceState, DraftTokens], of_model: Tensor
    ) -> VerifyResult:
        key, length = self._schedule.table.noise_key[row.table_row], int(self._schedule.table.length[row.table_row])
        return verify(guesses[row], of_model, self._speculation.vocabulary(row), key, length)

    def _take_guesses(
        self, part: DraftTokensPart, start: int, logits: Tensor, verified: VerifyResult
    ) -> AcceptedTokens:
        row, num = part.row, verified.num_accepted
        self._speculation.accept(row, slice(start, start + part.length), self._captured, num)
        row.draft_stats.add(part.length - 1, num)
        row.without_draft = not self._speculation.pays(row, self._schedule.num_sampled)
        return AcceptedTokens(row, np.append(part.tokens[1 : 1 + num], verified.token), logits[: num + 1])

    def _append_several(self, taken: Sequence[AcceptedTokens]) -> None:
        """Appends each sequence's tokens one by one until it ends."""
        for number in range(max(len(each.tokens) for each in taken)):
            going = [each for each in taken if number < len(each.tokens) and each.row.table_row != NOWHERE]
            if not going:
                return
            rows, tokens = [each.row for each in going], np.array([each.tokens[number] for each in going])
            logits = torch.stack([each.logits[number] for each in going])
            chosen = torch.from_numpy(tokens).to(logits.device)
            lines = np.array([row.table_row for row in rows], dtype=np.int64)
            ends = self._schedule.table.append(lines, tokens, logprobs_of(chosen, logits).cpu().numpy())
            if any(row.needs_token_checks for row in rows):
                self._watch(self._new_drawing(rows), logits, tokens, ends)
            self._end_all(rows, ends)

    def _new_drawing(self, rows: Sequence[SequenceState]) -> SamplingBatch:
        return SamplingBatch(rows, self._schedule.table, self._limits.vocab_size, self._base.device)

    def _note_computed(self, part: PrefillChunk, hidden: Tensor) -> None:
        """Records a part's progress. A prompt is scored once per job: later samples may be prefilled separately or
        again.
        """
        prefill, job = part.prefill, part.prefill.job
        if job.scores is not None:
            model = None if job.adapter_id is None else self._models.get(job.adapter_id)
            pair = model.unembed if isinstance(model, Adapter) else None
            logits_of = partial(self._head.logits, pair=pair)
            job.scores.score(part.start, hidden, logits_of, self._config.head_chunk_tokens)
        prefill.computed = part.stop
        if part.is_last:
            self._schedule.end_prefill(prefill)

    def _sample_tokens(self, drawing: SamplingBatch, hidden: Tensor, noise: Tensor) -> SampledBatch:
        """Samples the next token of each sequence.

        Args:
            hidden: the hidden state of each, [rows, hidden].
            noise: in [0, 1), [rows].
        """
        logits = self._head.logits_of_segments(hidden, self._segments(drawing.runs))
        adjusted = None if drawing.processors is None else drawing.processors.apply(logits, self._schedule.table)
        chosen = choose(logits, drawing.choice, noise.to(logits.dtype), adjusted)
        return SampledBatch(drawing, logits, self._together.agree_on_tokens(chosen))

    def _append(self, drawn: SampledBatch) -> None:
        """Appends the tokens. Sequences that end with them leave."""
        drawing, tokens = drawn.drawing, drawn.chosen.tokens.cpu().numpy()
        ends = self._schedule.table.append(drawing.lines, tokens, drawn.chosen.logprobs.cpu().numpy())
        if drawing.watched:
            self._watch(drawing, drawn.logits, tokens, ends)
        self._end_all(drawing.rows, ends)

    def _end_all(self, rows: Sequence[SequenceState], ends: np.ndarray) -> None:
        ended = {rows[number]: EndReason(ends[number]) for number in np.flatnonzero(ends).tolist()}
        for row in self._schedule.cache.in_removal_order(ended):
            self._end(row, ended[row])

    def _watch(self, drawing: SamplingBatch, logits: Tensor, tokens: np.ndarray, ends: np.ndarray) -> None:
        """Handles what needs a look at single sequences. Sets `ends` if a stop sequence is complete."""
        if drawing.most_top:
            rows = [n for n in drawing.watched if drawing.rows[n].job.request.topk_sample_logprobs]
            top = top_logprobs(torch.log_softmax(logits[rows], dim=-1), drawing.most_top)
            for number, ids, values in zip(rows, top.token_ids, top.logprobs, strict=True):
                drawing.rows[number].append_top(ids, values)
        for number in drawing.watched:
            row = drawing.rows[number]
            if ends[number] != EndReason.NOT_FINITE and self._stops_after(row, int(tokens[number])):
                ends[number] = EndReason.STOP

    def _stops_after(self, row: SequenceState, token: int) -> bool:
        try:
            return row.stops_after(token, self._schedule.table.count[row.table_row])
        except OperationError as error:
            self._fail(row.job, error.message, error.category)
            return False

    def _end(self, row: SequenceState, end: EndReason) -> None:
        job = row.job
        if job.request.job_id not in self._jobs:
            return
        if end is EndReason.NOT_FINITE:
            self._fail(
                job, f"the model's output is not finite: check that the weights of {job.weights_name} are finite"
            )
            return
        row.stop_reason = "stop" if end is EndReason.STOP else "length"
        self._schedule.end(row)
        job.num_open -= 1
        if job.num_open == 0:
            self._finished[job.request.job_id] = self._jobs.pop(job.request.job_id).result()

    def _segments(self, runs: Sequence[AdapterRun]) -> tuple[Segment, ...]:
        segments, start = [], 0
        for run in runs:
            model = None if run.adapter_id is None else self._models.get(run.adapter_id)
            segments.append(Segment(start, start + run.length, model))
            start += run.length
        return tuple(segments)

    def _tensor(self, integers: list[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(integers, dtype=torch.int64).to(self._base.device)

"""The native engine: continuous batching of sampling requests on the base model that also trains.

Every iteration admits what fits and then runs one packed row: the next token of every sample under way, and a bounded
number of tokens of prompts, so that nobody's decoding waits long for somebody's prompt. The samples of a prompt share
its prefill, and a sequence that begins like an earlier one starts where they part. When the cache is full the youngest
go back to wait and are prefilled again later: noise is counter-based, so that changes no token.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ...schemas.errors import Category, OperationError
from ...schemas.sampling import SampleResponse
from ..config import WorkerConfig
from ..head import Head
from ..lora import Adapter, Adapters, Plan, Segment
from ..model import BaseModel
from ..operation import ModelLimits
from ..verbs import Failure, SampledPart, SampleJob, Slice, SliceResult
from .batch import AdapterRun, Batch, Decoding, Part, Prefill
from .burst import Burst
from .cache import SHORTEST, Cache
from .choice import Chosen, choose
from .drawing import Drawing
from .jobs import NOWHERE, Job, Row, check_request
from .noise import uniforms
from .prefixes import length_of
from .prompt_scores import top_logprobs
from .table import End, Table
from .text import Text


@dataclass(frozen=True)
class Drawn:
    """The next token of every row of a drawing. logits: float32 [rows, vocab], the model's."""

    drawing: Drawing
    logits: Tensor
    chosen: Chosen


class NativeSampler:
    """One rank's sampler. Its state is the jobs under way, and the prefixes kept; it changes in `slice` alone."""

    def __init__(self, base: BaseModel, adapters: Adapters, limits: ModelLimits, config: WorkerConfig) -> None:
        self._base = base
        self._adapters = adapters
        self._head = Head(base, config.head_chunk_tokens)
        self._config = config
        self._limits = limits
        self._cache = Cache(base.config, base.dtype.itemsize, config.kv_cache_bytes)
        self._jobs: dict[str, Job] = {}
        self._num_joined = 0
        self._served: list[str] = []
        self._waiting: deque[Row] = deque()
        self._prefills: list[Prefill] = []
        self._table = Table()
        self._decoding_rows: dict[Row, None] = {}
        self._decoding: Decoding | None = None
        self._drawing: Drawing | None = None
        self._plan: Plan | None = None
        self._namespaces: WeakKeyDictionary[Adapter, tuple[int, int]] = WeakKeyDictionary()
        self._num_namespaces = 0
        self._finished: dict[str, SampleResponse | Failure] = {}
        self._text = Text(config.model.source, base)

    def slice(self, work: Slice) -> SliceResult:
        """Cancelled jobs are not answered. Runs over its budget by at most one iteration."""
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
            # A token may be half drawn and the cache half resized: the caller fails all jobs, so forget them here too.
            self._forget_all()
            raise
        return SliceResult(self._finished, len(self._jobs), self._progress())

    def cache_bytes(self) -> int:
        """Of the budget: slots in use, slots that wait for use, and prefixes."""
        return self._cache.num_bytes()

    def held_bytes(self) -> int:
        """Of the slots in use."""
        return self._cache.held_bytes()

    def _progress(self) -> dict[str, tuple[SampledPart, ...]]:
        streaming = {job_id: job for job_id, job in self._jobs.items() if job.request.streams}
        for job in streaming.values():
            for row in job.rows:
                if row.line != NOWHERE:
                    self._table.note(row)
        untold = {job_id: job.untold() for job_id, job in streaming.items()}
        return {job_id: parts for job_id, parts in untold.items() if parts}

    @torch.no_grad()
    def _run_until(self, deadline: float) -> None:
        with ExitStack() as held:
            self._served = self._bring(self._choose_adapters(), held)
            held.enter_context(self._base.threads.restored())
            while self._table.num_lines or (self._waiting and self._is_served(self._waiting[0])):
                self._iterate(deadline)
                if time.monotonic() >= deadline:
                    break
        if not self._table.num_lines:
            # It may have grown for one long sample, and the others hold adapters and jobs.
            self._table, self._plan, self._drawing = Table(), None, None

    def _iterate(self, deadline: float) -> None:
        self._make_room()
        self._admit()
        batch = self._next_batch()
        if batch.decoding is not None and not batch.parts:
            self._decode(batch.decoding, deadline)
        elif batch.num_tokens:
            self._extend(batch, self._run(batch))

    # Who comes and goes

    def _choose_adapters(self) -> list[str]:
        """Of this slice: those of the rows under way, then those of jobs as they came, as many as the device holds."""
        under_way = [row.job for row in self._under_way()]
        wanted = dict.fromkeys(job.adapter_id for job in (*under_way, *self._jobs.values()))
        return list(islice((one for one in wanted if one is not None), self._config.adapter_slots))

    def _bring(self, adapter_ids: list[str], held: ExitStack) -> list[str]:
        """Those now held on the device. When not all of them come, each by itself: the jobs of one that fails end."""
        try:
            held.enter_context(self._adapters.resident(adapter_ids))
            return adapter_ids
        except OperationError as error:
            if len(adapter_ids) == 1:
                self._fail_jobs_of(adapter_ids[0], error)
                return []
        return [brought for each in adapter_ids for brought in self._bring([each], held)]

    def _is_served(self, row: Row) -> bool:
        return row.job.adapter_id is None or row.job.adapter_id in self._served

    def _forget_all(self) -> None:
        self._jobs.clear()
        self._waiting.clear()
        self._prefills.clear()
        self._decoding_rows.clear()
        self._decoding = self._drawing = self._plan = None
        self._table = Table()
        self._cache.clear()

    def _join(self, request: SampleJob) -> None:
        assert request.job_id not in self._jobs, f"job {request.job_id} joined twice"
        try:
            check_request(request, self._limits)
            job = Job(request, self._num_joined, self._limits, self._text)
            self._check_cache(job)
        except OperationError as error:
            self._finished[request.job_id] = Failure(error.message, error.category)
            return
        self._num_joined += 1
        self._jobs[request.job_id] = job
        self._waiting.extend(job.rows)

    def _check_cache(self, job: Job) -> None:
        """What asks for too much is refused now. Without max_tokens a sample may end long before the context does."""
        row = job.rows[0]
        length = row.longest_cached if job.request.params.max_tokens else row.length + 1
        if row.needs_cache and not self._cache.fits_alone(length):
            raise OperationError(self._cache_message(length))

    def _cache_message(self, length: int) -> str:
        needed = length * self._cache.bytes_per_token
        return (
            f"a sequence of {length} tokens needs {needed} bytes of key/value cache, more than kv_cache_bytes"
            f" {self._cache.budget_bytes}: lower max_tokens, shorten the prompt or start the server with a larger"
            " --kv-cache-bytes"
        )

    def _fail_dropped(self) -> None:
        for job in list(self._jobs.values()):
            if job.adapter_id is not None and job.adapter_id not in self._adapters:
                self._fail(job, f"adapter {job.adapter_id} is gone: its sampler was closed or never saved")

    def _fail_jobs_of(self, adapter_id: str, error: OperationError) -> None:
        for job in list(self._jobs.values()):
            if job.adapter_id == adapter_id:
                self._fail(job, error.message, error.category)

    def _fail(self, job: Job, message: str, category: Category = "user") -> None:
        self._remove(job.request.job_id)
        self._finished[job.request.job_id] = Failure(message, category)

    def _remove(self, job_id: str) -> None:
        """Frees all that a job holds; unknown ids (it may just have ended) are ignored."""
        job = self._jobs.pop(job_id, None)
        for row in job.rows if job else ():
            self._release(row)
        self._waiting = deque(row for row in self._waiting if row.job is not job)

    def _release(self, row: Row) -> None:
        """Rows that are not under way are ignored."""
        if row.line == NOWHERE:
            return
        self._table.leave(row)
        self._cache.remove(row)
        self._decoding_rows.pop(row, None)
        self._decoding = self._drawing = None
        for prefill in self._prefills:
            if row in prefill.rows:
                prefill.rows.remove(row)
        self._prefills = [prefill for prefill in self._prefills if prefill.rows]

    def _under_way(self) -> list[Row]:
        return [*self._decoding_rows, *(row for prefill in self._prefills for row in prefill.rows)]

    # Room in the cache

    def _make_room(self) -> None:
        """For one more token of every row that decodes; where there is none, the youngest give way."""
        decoding = self._current_decoding()
        for row in decoding.outgrown(self._table) if decoding is not None else ():
            while row in self._decoding_rows and not self._grow(row):
                self._preempt_youngest()

    def _grow(self, row: Row) -> bool:
        length = int(self._table.length[row.line])
        if not self._cache.grow(row, self._with_headroom(row, length)) and not self._cache.grow(row, length):
            return False
        self._decoding = None
        return True

    def _with_headroom(self, row: Row, length: int) -> int:
        """So that it need not move again at once."""
        return max(length, min(length + SHORTEST, row.longest_cached))

    def _preempt_youngest(self) -> None:
        """It waits again, also when it is alone and needs the place of its slot for a longer one."""
        under_way = self._under_way()
        youngest = max(under_way, key=lambda row: row.order)
        length = int(self._table.length[youngest.line])
        if len(under_way) == 1 and not self._cache.fits_alone(length):
            self._fail(youngest.job, self._cache_message(length))
            return
        self._release(youngest)
        self._waiting.appendleft(youngest)

    # Admission

    def _admit(self) -> None:
        """Waiting rows in their order, until one does not fit or prompts enough are under way.

        One whose adapter has no slot in this slice lets none pass, lest it wait for ever.
        """
        budget = self._prefill_budget() - sum(prefill.remaining for prefill in self._prefills)
        while self._waiting and self._table.num_lines < self._config.head_chunk_tokens:
            row = self._waiting[0]
            if not self._is_served(row):
                return
            if self._prefills and self._prefills[-1].takes(row):
                admitted = self._follow(self._prefills[-1], row)
            elif budget <= 0:
                return
            else:
                admitted = self._begin(row)
                budget -= self._prefills[-1].remaining if admitted else 0
            if not admitted and self._table.num_lines:
                return
            if not admitted:
                self._fail(row.job, self._cache_message(row.length + 1))

    def _prefill_budget(self) -> int:
        """Tokens of prompts in an iteration: few where others wait for their next token meanwhile."""
        return self._config.prefill_chunk_tokens if self._decoding_rows else self._config.micro_batch_tokens

    def _follow(self, prefill: Prefill, row: Row) -> bool:
        if row.needs_cache and not self._place(row):
            return False
        prefill.rows.append(row)
        self._enter(row)
        return True

    def _begin(self, row: Row) -> bool:
        sequence, namespace = row.sequence(), self._namespace(row.job.adapter_id)
        known = self._cache.prefixes.find(namespace, sequence, self._num_reusable(row))
        needs_slot = row.needs_cache or self._is_long(len(sequence) - length_of(known), len(sequence))
        cached = (needs_slot or bool(known)) and self._place(row)
        if needs_slot and not cached:
            return False
        if cached and known:
            self._cache.restore(row, known)
        prefill = Prefill([row], sequence, cached, namespace, computed=length_of(known) if cached else 0)
        if row.job.num_cache_hits is None:
            row.job.num_cache_hits = prefill.computed
        self._prefills.append(prefill)
        self._enter(row)
        return True

    def _is_long(self, num_tokens: int, length: int) -> bool:
        """Whether it is to run in chunks, as all do that are not longer than the whole cache."""
        return num_tokens > self._prefill_budget() and self._cache.fits_alone(length)

    def _num_reusable(self, row: Row) -> int:
        """Tokens of its sequence that need not be run again: the last one must. Who has tokens has a scored prompt."""
        return min(row.length - 1, row.job.num_reusable + len(row.tokens))

    def _place(self, row: Row) -> bool:
        if self._cache.place(row, self._with_headroom(row, row.length)):
            return True
        # Beside others it would have to give way again soon.
        return not self._table.num_lines and self._cache.place(row, row.length + 1)

    def _enter(self, row: Row) -> None:
        self._waiting.popleft()
        self._table.enter(row)

    def _namespace(self, adapter_id: str | None) -> int:
        """A number for these weights, that no others have had."""
        if adapter_id is None:
            return 0
        adapter = self._adapters.get(adapter_id)
        num_changes, number = self._namespaces.get(adapter, (-1, 0))
        if num_changes != adapter.num_changes:
            self._num_namespaces += 1
            number = self._num_namespaces
            self._namespaces[adapter] = adapter.num_changes, number
        return number

    # An iteration

    def _next_batch(self) -> Batch:
        budget, parts = self._prefill_budget(), []
        for prefill in self._prefills:
            length = min(prefill.remaining, budget) if prefill.cached else prefill.remaining
            if length > 0:
                parts.append(Part(prefill, prefill.computed, prefill.computed + length))
                budget -= length
        return Batch.of(self._current_decoding(), parts, self._cache)

    def _current_decoding(self) -> Decoding | None:
        if self._decoding_rows and self._decoding is None:
            self._decoding = Decoding(list(self._decoding_rows), self._cache, self._base.device)
            self._drawing = None
        return self._decoding

    def _decode(self, decoding: Decoding, deadline: float) -> None:
        """Steps of rows that decode, until one of them ends or may have to leave its slot."""
        drawing = self._drawing = self._drawing or self._new_drawing(decoding.rows)
        burst = Burst(decoding, drawing, self._table, self._base.device)
        self._set_threads(len(decoding.rows))
        with self._adapters.applied(self._plan_of(drawing.runs)):
            while True:
                hidden = self._base.hidden_states(burst.tokens, burst.positions, burst.packing())
                drawn = self._draw(drawing, hidden, burst.noise())
                goes_on = drawing.is_plain and burst.num_steps < burst.most_steps and burst.take(drawn.chosen)
                if not goes_on or time.monotonic() >= deadline:
                    break
        burst.close()
        if not goes_on:
            self._append(drawn)

    def _run(self, batch: Batch) -> Tensor:
        """The hidden states [tokens, hidden] of the packed row."""
        self._set_threads(batch.num_tokens)
        tokens, positions = self._tensor(batch.tokens(self._table)), self._tensor(batch.positions(self._table))
        packing = batch.packing(self._table, self._cache, self._base.device)
        with self._adapters.applied(self._plan_of(batch.runs())):
            return self._base.hidden_states(tokens, positions, packing)

    def _set_threads(self, num_tokens: int) -> None:
        self._base.threads.set_for(self._base.weights_per_product, num_tokens, self._cache.numbers_per_layer())

    def _plan_of(self, runs: Sequence[AdapterRun]) -> Plan:
        segments = self._segments(runs)
        if self._plan is None or not self._plan.serves(segments):
            self._plan = self._adapters.plan(segments, self._plan)
        return self._plan

    def _extend(self, batch: Batch, hidden: Tensor) -> None:
        """The next token of every row that has run to its end."""
        rows = list(batch.decoding.rows) if batch.decoding is not None else []
        last = list(range(len(rows)))
        for start, part in zip(batch.starts(), batch.parts, strict=True):
            self._note_computed(part, hidden[start : start + part.length])
            if part.is_last:
                rows += part.prefill.rows
                last += [start + part.length - 1] * len(part.prefill.rows)
        if rows:
            drawing = self._new_drawing(rows)
            noise = uniforms(self._table.noise_key[drawing.lines], self._table.length[drawing.lines])
            self._append(self._draw(drawing, hidden[self._tensor(last)], torch.from_numpy(noise).to(hidden.device)))

    def _new_drawing(self, rows: Sequence[Row]) -> Drawing:
        return Drawing(rows, self._table, self._limits.vocab_size, self._base.device)

    def _note_computed(self, part: Part, hidden: Tensor) -> None:
        """The prompt is scored once a job: later samples of it may be prefilled apart, or again."""
        prefill, job = part.prefill, part.prefill.job
        if job.scores is not None:
            pair = None if job.adapter_id is None else self._adapters.get(job.adapter_id).unembed
            logits_of = partial(self._head.logits, pair=pair)
            job.scores.score(part.start, hidden, logits_of, self._config.head_chunk_tokens)
        prefill.computed = part.stop
        if part.is_last:
            self._end_prefill(prefill)

    def _end_prefill(self, prefill: Prefill) -> None:
        self._prefills.remove(prefill)
        leader, *others = prefill.rows
        if prefill.cached:
            if prefill.namespace == self._namespace(prefill.job.adapter_id):
                self._cache.keep(leader, prefill.namespace, prefill.sequence)
            self._cache.fork(leader, [row for row in others if row.needs_cache])
        for row in prefill.rows:
            row.namespace = prefill.namespace
            self._decoding_rows[row] = None
        self._decoding = None

    def _draw(self, drawing: Drawing, hidden: Tensor, noise: Tensor) -> Drawn:
        """The next token of each row from its hidden state [rows, hidden]. noise: [rows] in [0, 1)."""
        logits = self._head.logits_of_segments(hidden, self._segments(drawing.runs))
        adjusted = None if drawing.adjusting is None else drawing.adjusting.apply(logits, self._table)
        return Drawn(drawing, logits, choose(logits, drawing.choice, noise.to(logits.dtype), adjusted))

    def _append(self, drawn: Drawn) -> None:
        """Rows that end with their new token leave."""
        drawing, tokens = drawn.drawing, drawn.chosen.tokens.cpu().numpy()
        ends = self._table.append(drawing.lines, tokens, drawn.chosen.logprobs.cpu().numpy())
        if drawing.watched:
            self._watch(drawing, drawn.logits, tokens, ends)
        ended = {drawing.rows[number]: End(ends[number]) for number in np.flatnonzero(ends).tolist()}
        for row in self._cache.from_the_back(ended):
            self._end(row, ended[row])

    def _watch(self, drawing: Drawing, logits: Tensor, tokens: np.ndarray, ends: np.ndarray) -> None:
        """What must be looked at one by one: changes `ends` where a stop string is complete."""
        if drawing.most_top:
            rows = [n for n in drawing.watched if drawing.rows[n].job.request.topk_sample_logprobs]
            top = top_logprobs(torch.log_softmax(logits[rows], dim=-1), drawing.most_top)
            for number, ids, values in zip(rows, top.token_ids, top.logprobs, strict=True):
                drawing.rows[number].append_top(ids, values)
        for number in drawing.watched:
            row = drawing.rows[number]
            if ends[number] != End.NOT_FINITE and self._stops_after(row, int(tokens[number])):
                ends[number] = End.STOP

    def _stops_after(self, row: Row, token: int) -> bool:
        try:
            return row.stops_after(token, self._table.count[row.line])
        except OperationError as error:
            self._fail(row.job, error.message, error.category)
            return False

    def _end(self, row: Row, end: End) -> None:
        job = row.job
        if job.request.job_id not in self._jobs:
            return
        if end is End.NOT_FINITE:
            self._fail(job, f"the model's output is not finite: see whether the weights of {job.weights} are")
            return
        row.stop_reason = "stop" if end is End.STOP else "length"
        self._keep_prefix(row)
        self._release(row)
        job.num_open -= 1
        if job.num_open == 0:
            self._finished[job.request.job_id] = self._jobs.pop(job.request.job_id).result()

    def _keep_prefix(self, row: Row) -> None:
        """For the next turn of a conversation. The newest token has not run yet."""
        if self._cache.seat(row) is not None and row.namespace == self._namespace(row.job.adapter_id):
            self._table.note(row)
            self._cache.keep(row, row.namespace, row.sequence()[:-1])

    def _segments(self, runs: Sequence[AdapterRun]) -> tuple[Segment, ...]:
        segments, start = [], 0
        for run in runs:
            adapter = None if run.adapter_id is None else self._adapters.get(run.adapter_id)
            segments.append(Segment(start, start + run.length, adapter))
            start += run.length
        return tuple(segments)

    def _tensor(self, integers: list[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(integers, dtype=torch.int64).to(self._base.device)

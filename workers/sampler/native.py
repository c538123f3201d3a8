"""The native engine: continuous batching of sampling requests on the base model that also trains.

Every iteration admits what fits (prefill, packed; the samples of a prompt share one) and then decodes one token of
every sample in one packed row. Samples leave as they end, and waiting ones take their slots. When the cache outgrows
its budget the youngest go back to wait and are prefilled again later: noise is counter-based, so that changes no token.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from ...schemas.errors import Category, OperationError
from ...schemas.sampling import SampleResponse
from ..attention import DecodeStep, Packing, pack_lengths
from ..config import WorkerConfig
from ..head import Head
from ..lora import Adapters, Plan, Segment
from ..model import BaseModel
from ..operation import ModelLimits
from ..verbs import Failure, SampledPart, SampleJob, Slice, SliceResult
from .choice import Choice, choose
from .jobs import Job, Row, check_request
from .noise import uniforms
from .prompt_scores import score_prompt, top_logprobs, wants_scores
from .slots import Slots
from .stopping import Detokenizer


@dataclass(frozen=True)
class Batch:
    """Rows that take their next tokens together, one adapter's after the other's.

    noise_keys: uint64 [n]. top: the most topk_sample_logprobs of any row.
    """

    rows: list[Row]
    segments: tuple[Segment, ...]
    choice: Choice
    noise_keys: np.ndarray
    top: int


@dataclass(frozen=True)
class Decoding:
    """The batch of all rows that hold a slot; slots and row_of_slot as in DecodeStep."""

    batch: Batch
    plan: Plan
    slots: Tensor
    row_of_slot: Tensor | None


@dataclass(frozen=True)
class Prefill:
    """A sequence to run through the model, and the rows that go on from it; slots are theirs, empty without cache."""

    rows: list[Row]
    slots: list[int]


class NativeSampler:
    """One rank's sampler. Its state is the jobs under way; it changes in `slice` alone."""

    def __init__(self, base: BaseModel, adapters: Adapters, limits: ModelLimits, config: WorkerConfig) -> None:
        self._base = base
        self._adapters = adapters
        self._head = Head(base, config.head_chunk_tokens)
        self._config = config
        self._limits = limits
        self._jobs: dict[str, Job] = {}
        self._num_joined = 0
        self._served: list[str] = []
        self._waiting: deque[Row] = deque()
        self._slots = self._new_slots()
        self._decoding: Decoding | None = None
        self._finished: dict[str, SampleResponse | Failure] = {}
        self._tokenizer: Detokenizer | None = None

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
        finally:
            # Adapters are overwritten and moved between slices, and this holds copies of them.
            self._decoding = None
        return SliceResult(self._finished, len(self._jobs), self._progress())

    def _progress(self) -> dict[str, tuple[SampledPart, ...]]:
        untold = {job_id: job.untold() for job_id, job in self._jobs.items() if job.request.streams}
        return {job_id: parts for job_id, parts in untold.items() if parts}

    @torch.no_grad()
    def _run_until(self, deadline: float) -> None:
        with ExitStack() as held:
            self._served = self._bring(self._choose_adapters(), held)
            while self._slots.rows or (self._waiting and self._is_served(self._waiting[0])):
                self._admit()
                self._decode()
                if time.monotonic() >= deadline:
                    break

    def _choose_adapters(self) -> list[str]:
        """Of this slice: those of the rows in slots, then those of jobs as they came, as many as the device holds."""
        jobs = (*(row.job for row in self._slots.rows), *self._jobs.values())
        wanted = dict.fromkeys(job.adapter_id for job in jobs if job.adapter_id is not None)
        return list(islice(wanted, self._config.adapter_slots))

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
        self._slots = self._new_slots()

    def cache_bytes(self) -> int:
        return self._slots.cache.num_bytes()

    def _new_slots(self) -> Slots:
        """A step makes one row of logits a slot."""
        config = self._config
        return Slots(self._base.config, self._base.dtype.itemsize, config.kv_cache_bytes, config.head_chunk_tokens)

    def _join(self, request: SampleJob) -> None:
        assert request.job_id not in self._jobs, f"job {request.job_id} joined twice"
        try:
            check_request(request, self._limits)
            job = Job(request, self._num_joined, self._limits, self._tokenizer_for(request))
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
        if row.needs_cache and not self._slots.fits(1, length):
            raise OperationError(self._cache_message(length))

    def _cache_message(self, length: int) -> str:
        needed = length * self._slots.bytes_per_token
        return (
            f"a sequence of {length} tokens needs {needed} bytes of key/value cache, more than kv_cache_bytes"
            f" {self._slots.budget_bytes}: lower max_tokens, shorten the prompt or start the server with a larger"
            " --kv-cache-bytes"
        )

    def _tokenizer_for(self, request: SampleJob) -> Detokenizer | None:
        if request.stop_strings and self._tokenizer is None:
            self._tokenizer = _load_tokenizer(self._config.model.source)
        return self._tokenizer

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
        if row in self._slots.rows:
            self._slots.remove(row)
            self._decoding = None

    def _admit(self) -> None:
        """Prefills waiting rows in their order, until one does not fit or a micro-batch is full.

        One whose adapter has no slot in this slice lets none pass, lest it wait for ever.
        """
        prefills = self._take_waiting()
        cached, uncached = [p for p in prefills if p.slots], [p for p in prefills if not p.slots]
        for part in (cached, uncached):
            if part:
                self._prefill(part)

    def _take_waiting(self) -> list[Prefill]:
        prefills: list[Prefill] = []
        num_rows = num_tokens = 0
        while self._waiting and num_rows < self._slots.most_rows and self._is_served(self._waiting[0]):
            row = self._waiting[0]
            if row.needs_cache and not self._slots.admits(row):
                if self._slots.rows:
                    break
                self._fail(row.job, self._cache_message(row.length + 1))
                continue
            shares = bool(prefills) and _same_sequence(prefills[-1].rows[0], row)
            if not shares and prefills and num_tokens + row.length > self._config.micro_batch_tokens:
                break
            if not shares:
                prefills.append(Prefill([], []))
                num_tokens += row.length
            num_rows += 1
            prefills[-1].rows.append(self._waiting.popleft())
            if row.needs_cache:
                prefills[-1].slots.append(self._slots.add(row))
        self._slots.reserve(self._slots.longest() + 1)
        return prefills

    def _prefill(self, prefills: list[Prefill]) -> None:
        """All of them with slots, or all without (one more token is all that is wanted)."""
        prefills = sorted(prefills, key=lambda p: (p.rows[0].job.adapter_id or "", p.rows[0].length))
        self._decoding = None
        lengths = [p.rows[0].length for p in prefills]
        hidden = self._run_prefill(prefills, lengths)
        for p in prefills:
            if len(p.slots) > 1:
                self._slots.cache.copy_slot(p.slots[0], p.slots[1:])
        ends = np.cumsum(lengths)
        for p, length, end in zip(prefills, lengths, ends, strict=True):
            self._score_prompt(p.rows[0].job, hidden[end - length : end])
        last = np.repeat(ends - 1, [len(p.rows) for p in prefills])
        self._extend(self._batch([row for p in prefills for row in p.rows]), hidden[self._tensor(last)])

    def _run_prefill(self, prefills: list[Prefill], lengths: list[int]) -> Tensor:
        """The hidden states [tokens, hidden] of the packed sequences."""
        groups = pack_lengths(lengths)
        slots = [p.slots[0] for p in prefills if p.slots]
        packing = Packing(groups, self._slots.cache, self._tensor(slots)) if slots else Packing(groups)
        tokens = np.concatenate([p.rows[0].sequence() for p in prefills])
        positions = np.concatenate([np.arange(length) for length in lengths])
        segments = self._segments([p.rows[0].job.adapter_id for p in prefills], lengths)
        with self._adapters.applied(segments):
            return self._base.hidden_states(self._tensor(tokens), self._tensor(positions), packing)

    def _score_prompt(self, job: Job, hidden: Tensor) -> None:
        """Once a job: later samples of it may be prefilled apart, or again."""
        if job.scores is None and wants_scores(job.request):
            pair = None if job.adapter_id is None else self._adapters.get(job.adapter_id).unembed
            logits_of = partial(self._head.logits, pair=pair)
            job.scores = score_prompt(job.request, hidden, logits_of, self._config.head_chunk_tokens)

    def _decode(self) -> None:
        """One token of every row that holds a slot."""
        self._make_room()
        if not self._slots.rows:
            return
        decoding = self._decoding = self._decoding or self._decode_batch()
        batch = decoding.batch
        tokens = self._tensor([row.tokens[-1] for row in batch.rows])
        # The newest token of a row is the one that runs now: all before it are cached.
        lengths = self._tensor([row.length - 1 for row in batch.rows])
        step = DecodeStep(decoding.slots, decoding.row_of_slot, lengths, self._slots.longest())
        with self._adapters.applied(decoding.plan):
            hidden = self._base.hidden_states(tokens, lengths, Packing((), self._slots.cache, step=step))
        self._extend(batch, hidden)

    def _decode_batch(self) -> Decoding:
        by_slot = self._slots.rows
        slots = sorted(range(len(by_slot)), key=lambda slot: by_slot[slot].job.adapter_id or "")
        row_of_slot = None if slots == sorted(slots) else self._tensor(np.argsort(slots))
        batch = self._batch([by_slot[slot] for slot in slots])
        return Decoding(batch, self._adapters.plan(batch.segments), self._tensor(slots), row_of_slot)

    def _make_room(self) -> None:
        """For one more token of every row: the youngest give way, and one that is alone fails."""
        slots = self._slots
        while slots.rows and not slots.fits(len(slots.rows), slots.longest()):
            youngest = max(slots.rows, key=lambda row: row.order)
            if len(slots.rows) == 1:
                self._fail(youngest.job, self._cache_message(youngest.length))
            else:
                self._release(youngest)
                self._waiting.appendleft(youngest)
        slots.reserve(slots.longest())

    def _extend(self, batch: Batch, hidden: Tensor) -> None:
        """The next token of every row of the batch, from its hidden state [rows, hidden]."""
        log_softmax = torch.log_softmax(self._head.logits_of_segments(hidden, batch.segments), dim=-1)
        noise = uniforms(batch.noise_keys, np.array([row.length for row in batch.rows]))
        tokens = choose(log_softmax, batch.choice, torch.from_numpy(noise).to(log_softmax))
        logprobs = log_softmax.gather(1, tokens[:, None]).squeeze(1)
        if batch.top:
            top = top_logprobs(log_softmax, batch.top)
            for row, ids, values in zip(batch.rows, top.token_ids, top.logprobs, strict=True):
                row.append_top(ids, values)
        for row, token, logprob in zip(batch.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            self._append(row, token, logprob)

    def _append(self, row: Row, token: int, logprob: float) -> None:
        job = row.job
        if job.request.job_id not in self._jobs:
            return
        if not math.isfinite(logprob):
            self._fail(job, f"the model's output is not finite: see whether the weights of {job.weights} are")
            return
        row.append(token, logprob)
        if row.stop_reason is not None:
            self._release(row)
            job.num_open -= 1
            if job.num_open == 0:
                self._finished[job.request.job_id] = self._jobs.pop(job.request.job_id).result()

    def _batch(self, rows: list[Row]) -> Batch:
        """rows: one adapter's after the other's."""
        return Batch(
            rows=rows,
            segments=self._segments([row.job.adapter_id for row in rows], [1] * len(rows)),
            choice=Choice.of([row.job.request.params for row in rows], self._limits.vocab_size, self._base.device),
            noise_keys=np.array([row.noise_key for row in rows], dtype=np.uint64),
            top=max(row.job.request.topk_sample_logprobs for row in rows),
        )

    def _segments(self, adapter_ids: Sequence[str | None], lengths: Sequence[int]) -> tuple[Segment, ...]:
        """Consecutive sequences of one adapter are one segment."""
        segments, start = [], 0
        for adapter_id, part in groupby(zip(adapter_ids, lengths, strict=True), key=lambda pair: pair[0]):
            stop = start + sum(length for _, length in part)
            segments.append(Segment(start, stop, None if adapter_id is None else self._adapters.get(adapter_id)))
            start = stop
        return tuple(segments)

    def _tensor(self, integers: list[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(integers, dtype=torch.int64).to(self._base.device)


def _same_sequence(one: Row, other: Row) -> bool:
    return one.job is other.job and not one.tokens and not other.tokens


def _load_tokenizer(source: str) -> Detokenizer:
    """Raises OperationError when there is none; for some models transformers then makes up one of special tokens."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        reason = None if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else "its vocabulary is empty"
    except (OSError, ValueError) as error:
        tokenizer, reason = None, str(error)
    if tokenizer is None or reason is not None:
        raise OperationError(
            f"stop strings need the model's tokenizer, which {source} does not have: give stop token ids ({reason})"
        )
    return tokenizer

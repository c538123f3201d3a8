"""The jobs of a sampler from joining to their result: what passes sample for them, and when they end."""

from collections.abc import Container, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...schemas.errors import Category, OperationError
from ...schemas.sampling import SampleResponse
from ..protocol.calls import Failure, SampledPart, SampleJob
from .batch import Batch
from .rank_sync import RankSync
from .requests.jobs import NOWHERE, Job, SequenceState
from .requests.prompt_scores import top_logprobs
from .requests.sequence_table import EndReason
from .requests.token_choice import logprobs_of
from .runner import PassOutput, VerifiedChunk
from .sampling import AdapterSpan
from .scheduler import SequenceScheduler
from .shared_state import SharedState


class ActiveJobs:
    """The jobs that have not ended, in order of arrival.

    finished: results of the jobs that ended in this slice, by id; cancelled ones get none.
    """

    def __init__(self, shared: SharedState, scheduler: SequenceScheduler, ranks: RankSync) -> None:
        self._limits, self._text, self._flops = shared.limits, shared.text, shared.flops
        self._scheduler, self._ranks = scheduler, ranks
        self._jobs: dict[str, Job] = {}
        self._num_joined = 0
        self.finished: dict[str, SampleResponse | Failure] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """Yields the jobs, which may end meanwhile."""
        return iter(list(self._jobs.values()))

    @property
    def failures(self) -> dict[str, Failure]:
        return {job_id: result for job_id, result in self.finished.items() if isinstance(result, Failure)}

    def join(self, spec: SampleJob) -> None:
        """Adds a job. An invalid one fails."""
        assert spec.job_id not in self._jobs, f"job {spec.job_id} joined twice"
        try:
            job = Job(spec, self._num_joined, self._limits, self._text, self._ranks.is_leader)
            self._scheduler.add(job)
        except OperationError as error:
            self.finished[spec.job_id] = Failure.of(error)
            return
        self._num_joined += 1
        self._jobs[spec.job_id] = job

    def remove(self, job_id: str) -> None:
        """Frees everything that a job holds. Unknown ids are ignored: the job may just have ended."""
        if job := self._jobs.pop(job_id, None):
            self._scheduler.remove(job)

    def fail(self, job_id: str, message: str, category: Category = "user") -> None:
        """Ends a job with a failure. Ignored if it has ended."""
        if job_id in self._jobs:
            self.remove(job_id)
            self.finished[job_id] = Failure(message, category)

    def fail_adapter(self, adapter_id: str, error: OperationError) -> None:
        """Fails the jobs of an adapter."""
        for job in self:
            if job.adapter_id == adapter_id:
                self.fail(job.spec.job_id, error.message, error.category)

    def fail_dropped(self, models: Container[str]) -> None:
        """Fails the jobs of adapters that are not among the models."""
        for job in self:
            if job.adapter_id is not None and job.adapter_id not in models:
                self.fail(job.spec.job_id, f"adapter {job.adapter_id} is gone: its sampler was closed or never saved")

    def end(self, sequence: SequenceState, reason: EndReason) -> None:
        """Ends a sequence, and its job if it was the last one. Ignored if the job has ended."""
        job, job_id = sequence.job, sequence.job.spec.job_id
        if job_id not in self._jobs:
            return
        if reason is EndReason.NOT_FINITE:
            name = "the base model" if job.adapter_id is None else f"adapter {job.adapter_id}"
            self.fail(job_id, f"the model's output is not finite: check that the weights of {name} are finite")
            return
        if reason is EndReason.CONSTRAINT_FAILED:
            matcher = sequence.matcher
            self.fail(job_id, (matcher and matcher.failure) or "the first rank could not apply the constraint")
            return
        sequence.stop_reason = "stop" if reason is EndReason.STOP else "length"
        self._scheduler.end(sequence)
        job.num_open -= 1
        if job.num_open == 0:
            self.finished[job_id] = self._jobs.pop(job_id).result()

    def take_new_parts(self) -> dict[str, tuple[SampledPart, ...]]:
        """Returns the tokens that the streaming jobs have sampled since the last call."""
        streaming = {job_id: job for job_id, job in self._jobs.items() if job.spec.streams}
        for job in streaming.values():
            for sequence in job.sequences:
                if sequence.line != NOWHERE:
                    self._scheduler.table.copy_to(sequence)
        parts = {job_id: job.take_new_parts() for job_id, job in streaming.items()}
        return {job_id: new for job_id, new in parts.items() if new}

    def clear(self) -> None:
        """Forgets the jobs, which get no result. The caller clears the scheduler."""
        self._jobs.clear()

    # What a pass sampled

    def update(self, batch: Batch, output: PassOutput) -> None:
        """Records a pass: its tokens, and the sequences and jobs that end with them.

        The tokens of a pass that is repeated are not in the table before `write_back`.
        """
        if output.sampled is not None and batch.take(output.sampled):
            return
        self.write_back(batch)
        self._flops.add_batch(batch)
        for chunk in batch.chunks:
            self._scheduler.end_chunk(chunk)
        if (sampled := output.sampled) is not None:
            metadata, tokens = sampled.metadata, sampled.chosen.tokens.cpu().numpy()
            self._flops.add_scored(metadata.adapter_spans)
            logprobs = sampled.chosen.logprobs
            self._append(metadata.sequences, metadata.lines, metadata.watched, tokens, logprobs, sampled.logits)
        self._accept(output)

    def write_back(self, batch: Batch) -> None:
        """Writes the tokens of passes that are not in the table yet. The next pass is a new batch."""
        if num_passes := batch.write_back():
            num_run = batch.decoding.positions() - num_passes
            self._flops.add_steps(batch.decoding.adapter_spans(), num_run, num_passes)

    def _append(
        self,
        sequences: Sequence[SequenceState],
        lines: np.ndarray,
        watched: list[int],
        tokens: np.ndarray,
        logprobs: Tensor,
        logits: Tensor,
    ) -> None:
        """Appends one token to each sequence, and ends those that it completes. watched: those that need a look."""
        ends = self._scheduler.table.append(lines, tokens, logprobs.cpu().numpy())
        self._watch(sequences, watched, logits, tokens, ends)
        ended = {sequences[number]: EndReason(ends[number]) for number in np.flatnonzero(ends).tolist()}
        for sequence in self._scheduler.slots.cache.in_removal_order(ended):
            self.end(sequence, ended[sequence])

    def _accept(self, output: PassOutput) -> None:
        """Appends the draft tokens that are accepted, and a token after them.

        Sequences whose draft does not pay continue without it.
        """
        # Other sequences of this pass may have ended their jobs.
        placed = [each for each in output.verified if each.chunk.sequence.line != NOWHERE]
        if not placed or (proposer := self._scheduler.slots.proposer) is None:
            return
        self._scheduler.slots.pending.begin([each.chunk for each in output.verified], output.pending)
        for each in placed:
            sequence, num = each.chunk.sequence, each.result.num_accepted
            proposer.accept(sequence, each.rows, output.captured or {}, num)
            sequence.draft_stats.add(each.chunk.length - 1, num)
            self._flops.add_steps([AdapterSpan(sequence.job.adapter_id, 1)], np.array([each.chunk.start]), num + 1)
            sequence.without_draft = not proposer.pays(sequence, self._scheduler.num_sampled)
        self._append_accepted(placed)
        self._scheduler.slots.advance_states(self._scheduler.table)
        for sequence in self._scheduler.with_drafts():
            if sequence.without_draft:
                self._scheduler.stop_drafting(sequence)

    def _append_accepted(self, verified: Sequence[VerifiedChunk]) -> None:
        """Appends each sequence's tokens one by one until it ends."""
        table = self._scheduler.table
        for number in range(max(len(each.tokens) for each in verified)):
            going = [each for each in verified if number < len(each.tokens) and each.chunk.sequence.line != NOWHERE]
            if not going:
                return
            sequences = [each.chunk.sequence for each in going]
            tokens = np.array([each.tokens[number] for each in going])
            logits = torch.stack([each.logits[number] for each in going])
            chosen = torch.from_numpy(tokens).to(logits.device)
            lines = np.array([sequence.line for sequence in sequences], dtype=np.int64)
            watched = np.flatnonzero(table.is_watched[lines]).tolist()
            self._append(sequences, lines, watched, tokens, logprobs_of(chosen, logits), logits)

    def _watch(
        self,
        sequences: Sequence[SequenceState],
        watched: list[int],
        logits: Tensor,
        tokens: np.ndarray,
        ends: np.ndarray,
    ) -> None:
        """Handles the sequences that need a look at each token. Sets `ends` if a stop sequence is complete."""
        with_top = [number for number in watched if sequences[number].job.spec.topk_sample_logprobs]
        if with_top:
            most = max(sequences[number].job.spec.topk_sample_logprobs for number in with_top)
            top = top_logprobs(torch.log_softmax(logits[with_top], dim=-1), most)
            for number, ids, values in zip(with_top, top.token_ids, top.logprobs, strict=True):
                sequences[number].append_top(ids, values)
        count = self._scheduler.table.count
        for number in watched:
            sequence = sequences[number]
            if ends[number] != EndReason.NOT_FINITE and sequence.stops_after(int(tokens[number]), count[sequence.line]):
                has_failed = sequence.matcher is not None and sequence.matcher.failure is not None
                ends[number] = EndReason.CONSTRAINT_FAILED if has_failed else EndReason.STOP
        if any(sequences[number].job.is_constrained for number in watched):
            ends[:] = self._ranks.from_leader(torch.from_numpy(ends)).numpy()

"""Records what passes sampled, and ends the sequences that are complete."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .active_jobs import ActiveJobs
from .decoding.batch import Batch
from .decoding.metadata import AdapterSpan, SampledTokens
from .decoding.rank_sync import RankSync
from .logits.token_choice import logprobs_of
from .requests.jobs import NOWHERE, SequenceState
from .requests.prompt_scores import top_logprobs
from .requests.sequence_table import EndReason
from .runner import PassOutput, VerifiedChunk
from .sampled_flops import SampledFlops
from .scheduler import SequenceScheduler
from .speculation import Proposer


class TokenRecorder:
    """Writes tokens to the scheduler's table. Sequences that end with them leave it."""

    def __init__(
        self,
        scheduler: SequenceScheduler,
        jobs: ActiveJobs,
        proposer: Proposer,
        ranks: RankSync,
        flops: SampledFlops,
    ) -> None:
        self._scheduler, self._jobs, self._proposer = scheduler, jobs, proposer
        self._ranks, self._flops = ranks, flops
        self._taking: Batch | None = None

    def update(self, batch: Batch, output: PassOutput) -> None:
        """Records a pass. The tokens of one that is repeated are not in the table before `write_back`."""
        if output.sampled is not None and batch.take(output.sampled):
            self._taking = batch
            return
        self.write_back()
        self._flops.add_batch(batch)
        for chunk in batch.chunks:
            self._scheduler.end_chunk(chunk)
        if output.sampled is not None:
            self._flops.add_scored(output.sampled.metadata.adapter_spans)
            self._append(output.sampled)
        self._accept(output)

    def write_back(self) -> None:
        """Writes the tokens of passes that are not in the table yet. The next pass is a new batch."""
        if self._taking is not None:
            num_run = self._taking.table.length[self._taking.lines] - 1
            self._flops.add_steps(self._taking.adapter_spans(), num_run, self._taking.write_back())
            self._taking = None

    def forget(self) -> None:
        """Drops the tokens that are not in the table yet."""
        self._taking = None

    def _append(self, sampled: SampledTokens) -> None:
        """Appends one token to each sequence."""
        metadata, tokens = sampled.metadata, sampled.chosen.tokens.cpu().numpy()
        ends = self._scheduler.table.append(metadata.lines, tokens, sampled.chosen.logprobs.cpu().numpy())
        self._watch(metadata.sequences, metadata.watched, sampled.logits, tokens, ends)
        self._end_all(metadata.sequences, ends)

    def _accept(self, output: PassOutput) -> None:
        """Appends the draft tokens that are accepted, and a token after them.

        Sequences whose draft does not pay continue without it.
        """
        # Other sequences of this pass may have ended their jobs.
        placed = [each for each in output.verified if each.chunk.sequence.line != NOWHERE]
        if not placed:
            return
        self._scheduler.slots.pending.begin([each.chunk for each in output.verified], output.pending)
        for each in placed:
            sequence, num = each.chunk.sequence, each.result.num_accepted
            self._proposer.accept(sequence, each.rows, output.captured or {}, num)
            sequence.draft_stats.add(each.chunk.length - 1, num)
            self._flops.add_steps([AdapterSpan(sequence.job.adapter_id, 1)], np.array([each.chunk.start]), num + 1)
            sequence.without_draft = not self._proposer.pays(sequence, self._scheduler.num_sampled)
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
            ends = table.append(lines, tokens, logprobs_of(chosen, logits).cpu().numpy())
            self._watch(sequences, np.flatnonzero(table.is_watched[lines]).tolist(), logits, tokens, ends)
            self._end_all(sequences, ends)

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

    def _end_all(self, sequences: Sequence[SequenceState], ends: np.ndarray) -> None:
        ended = {sequences[number]: EndReason(ends[number]) for number in np.flatnonzero(ends).tolist()}
        for sequence in self._scheduler.slots.cache.in_removal_order(ended):
            self._jobs.end(sequence, ended[sequence])

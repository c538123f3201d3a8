"""Appends sampled tokens to their sequences, and ends those that are complete."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .active_jobs import ActiveJobs
from .decoding.rank_sync import RankSync
from .decoding.sampling_batch import SampledBatch
from .logits.token_choice import logprobs_of
from .requests.jobs import NOWHERE, SequenceState
from .requests.prompt_scores import top_logprobs
from .requests.sequence_table import EndReason
from .sequence_scheduler import SequenceScheduler


@dataclass(frozen=True)
class AcceptedTokens:
    """The next tokens of a sequence after verifying draft tokens.

    tokens: int64, [n].
    logits: the model's, by which they were sampled, float32, [n, vocab].
    """

    sequence: SequenceState
    tokens: np.ndarray
    logits: Tensor


class TokenRecorder:
    """Writes tokens to the scheduler's table. Sequences that end with them leave it."""

    def __init__(self, scheduler: SequenceScheduler, jobs: ActiveJobs, ranks: RankSync) -> None:
        self._scheduler, self._jobs, self._ranks = scheduler, jobs, ranks

    def append(self, sampled: SampledBatch) -> None:
        """Appends one token to each sequence of the batch."""
        batch, tokens = sampled.sampling, sampled.chosen.tokens.cpu().numpy()
        ends = self._scheduler.table.append(batch.lines, tokens, sampled.chosen.logprobs.cpu().numpy())
        self._watch(batch.sequences, batch.watched, sampled.logits, tokens, ends)
        self._end_all(batch.sequences, ends)

    def append_accepted(self, accepted: Sequence[AcceptedTokens]) -> None:
        """Appends each sequence's tokens one by one until it ends."""
        table = self._scheduler.table
        for number in range(max(len(each.tokens) for each in accepted)):
            going = [each for each in accepted if number < len(each.tokens) and each.sequence.line != NOWHERE]
            if not going:
                return
            sequences, tokens = [each.sequence for each in going], np.array([each.tokens[number] for each in going])
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

"""Verifies draft tokens by the logits of the pass that they ran in."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from .decoding.batch import AdapterSpan, Batch, DraftTokensPart, adapter_spans
from .decoding.rank_sync import RankSync, VerifyResult
from .logits.token_choice import SamplingTensors, probabilities
from .model_runner import ModelRunner, PassOutput
from .requests.jobs import NOWHERE, SequenceState
from .sampled_flops import SampledFlops
from .sequence_scheduler import SequenceScheduler
from .speculation.proposer import Proposer
from .speculation.verification import DraftTokens, verify
from .token_recorder import AcceptedTokens, TokenRecorder


class DraftVerifier:
    """Accepts draft tokens, and one token of the model after them."""

    def __init__(
        self,
        scheduler: SequenceScheduler,
        proposer: Proposer,
        runner: ModelRunner,
        recorder: TokenRecorder,
        ranks: RankSync,
        flops: SampledFlops,
    ) -> None:
        self._scheduler, self._proposer, self._ranks, self._flops = scheduler, proposer, ranks, flops
        self._runner, self._recorder = runner, recorder

    def verify(self, batch: Batch, proposed: Mapping[SequenceState, DraftTokens], output: PassOutput) -> None:
        """Verifies the draft tokens of the batch and records the accepted ones.

        Sequences whose draft does not pay continue without it.
        """
        drafted = [
            (start, part)
            for start, part in zip(batch.starts(), batch.parts, strict=True)
            if isinstance(part, DraftTokensPart)
        ]
        # Other sequences of this pass may have ended their jobs.
        placed = [(start, part) for start, part in drafted if part.sequence.line != NOWHERE]
        if not placed:
            return
        self._scheduler.slots.pending.begin([part for _, part in drafted], output.pending)
        parts = [part for _, part in placed]
        rows = np.concatenate([np.arange(start, start + part.length) for start, part in placed])
        logits = self._runner.logits(
            output.hidden[self._runner.tensor(rows)],
            adapter_spans((part.sequence.job.adapter_id, part.length) for part in parts),
        )
        stops = np.cumsum([part.length for part in parts]).tolist()
        places = [slice(stop - part.length, stop) for stop, part in zip(stops, parts, strict=True)]
        verified = self._verified(parts, places, proposed, logits)
        accepted = [
            self._accept(part, start, logits[here], result, output)
            for (start, part), here, result in zip(placed, places, verified, strict=True)
        ]
        self._recorder.append_accepted(accepted)
        self._scheduler.slots.advance_states(self._scheduler.table)
        for sequence in self._scheduler.with_drafts():
            if sequence.without_draft:
                self._scheduler.stop_drafting(sequence)

    def _verified(
        self,
        parts: Sequence[DraftTokensPart],
        places: Sequence[slice],
        proposed: Mapping[SequenceState, DraftTokens],
        logits: Tensor,
    ) -> list[VerifyResult]:
        """Returns the result of each part, the same on all ranks. places: the part's rows of the logits."""
        table = self._scheduler.table
        lines = np.repeat([part.sequence.line for part in parts], [part.length for part in parts])
        choice = SamplingTensors.of(table.settings(lines), logits.shape[-1], logits.device)
        target = probabilities(logits, choice)
        own = []
        for part, here in zip(parts, places, strict=True):
            key, length = table.noise_key[part.sequence.line], int(table.length[part.sequence.line])
            vocabulary = self._proposer.vocabulary(part.sequence)
            own.append(verify(proposed[part.sequence], target[here], vocabulary, key, length))
        return self._ranks.agree_on_verified(own)

    def _accept(
        self, part: DraftTokensPart, start: int, logits: Tensor, verified: VerifyResult, output: PassOutput
    ) -> AcceptedTokens:
        sequence, num = part.sequence, verified.num_accepted
        self._proposer.accept(sequence, slice(start, start + part.length), output.captured, num)
        sequence.draft_stats.add(part.length - 1, num)
        self._flops.add_steps([AdapterSpan(sequence.job.adapter_id, 1)], np.array([part.start]), num + 1)
        sequence.without_draft = not self._proposer.pays(sequence, self._scheduler.num_sampled)
        return AcceptedTokens(sequence, np.append(part.tokens[1 : 1 + num], verified.token), logits[: num + 1])

"""Records what each rank sampled, and makes ranks draft differently, decide alone or fail."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.drafts.algorithms.eagle3 import Eagle3Network, Eagle3Pass
from trainhouse.workers.drafts.sequences.features import DraftInputs
from trainhouse.workers.drafts.speculation.draft_proposer import DraftProposer
from trainhouse.workers.protocol.calls import SamplingSlice, SliceResult
from trainhouse.workers.sampler.rank_sync import RankSync
from trainhouse.workers.sampler.requests.token_choice import DraftTokens, VerifyResult
from trainhouse.workers.state.vectors import FORWARD_VECTORS

from .faults import ERRORS
from .probe_worker import ProbeWorker


class Drafting:
    """Drafted sampling of one rank."""

    def __init__(self, rank: ProbeWorker) -> None:
        self._rank = rank
        self._sampled: dict[str, list[list[int]]] = {}
        self._num_overruled = 0
        self._of_base = rank.sampler._of_base
        self._rank_sync = self._of_base._ranks
        same, verified = self._rank_sync.from_leader, self._rank_sync.agree_on_verified
        sample_slice = rank.sample_slice

        def counted_same(integers: Tensor) -> Tensor:
            own = integers.clone()
            agreed = same(integers)
            self._num_overruled += int((agreed != own).sum())
            return agreed

        def counted_verified(own: Sequence[VerifyResult]) -> list[VerifyResult]:
            agreed = verified(own)
            self._num_overruled += sum(mine != theirs for mine, theirs in zip(own, agreed, strict=True))
            return agreed

        def recorded(work: SamplingSlice) -> SliceResult:
            result = sample_slice(work)
            for job_id, answer in self._of_base._jobs.finished.items():
                if isinstance(answer, SampleResponse):
                    self._sampled[job_id] = [each.tokens.tolist() for each in answer.sequences]
            return result

        vars(self._rank_sync).update(from_leader=counted_same, agree_on_verified=counted_verified)
        rank.sample_slice = recorded

    def sampled(self) -> dict[str, list[list[int]]]:
        """Returns this rank's sampled tokens by job, since the last call."""
        found, self._sampled = self._sampled, {}
        return found

    def num_overruled(self) -> int:
        """Returns how often this rank's draft tokens and decisions differed from the leader's, since the last call."""
        number, self._num_overruled = self._num_overruled, 0
        return number

    def disturb(self, rank: int, draft_id: str) -> None:
        """Changes the weights of that rank's draft. All ranks treat them as changed, so nothing cached is used."""
        with self._rank.models.resident([draft_id], FORWARD_VECTORS) as (draft,):
            noise = torch.randn(draft.weights.shape, generator=torch.Generator().manual_seed(1))
            draft.weights.add_(noise, alpha=float(self._rank.mesh.rank == rank))

    def decide_alone(self, decision: str) -> None:
        """Makes each rank use its own result of this method of RankSync; "" restores the exchange."""
        for name in ("from_leader", "agree_on_verified"):
            own = getattr(RankSync, name).__get__(self._rank_sync) if name != decision else _own
            setattr(self._rank_sync, name, own)

    def break_drafting(self, rank: int, error: str) -> None:
        """Makes that rank's drafts raise one of ERRORS."""
        if self._rank.mesh.rank == rank:
            self._of_base._proposer.propose = mock.Mock(side_effect=ERRORS[error])

    def know(self, texts: Mapping[str, Sequence[int]]) -> None:
        """Makes drafts propose these tokens, by job; they include the prompts. Empty: drafts propose their own."""

        def perfect(sequences: Any, table: Any) -> dict[Any, DraftTokens]:
            found = as_drawn(sequences, table)
            for sequence, each in found.items():
                first, num = int(table.length[sequence.line]), len(each.tokens)
                each.tokens[:] = texts[sequence.job.spec.job_id][first : first + num]
                if each.probabilities is not None:
                    each.probabilities.zero_()[np.arange(num), each.tokens] = 1
            return found

        as_drawn = DraftProposer.propose.__get__(self._of_base._proposer)
        self._of_base._proposer.propose = perfect if texts else as_drawn


def _own(answers: Any) -> Any:
    return answers


def see_own_tokens_only(_: ProbeWorker) -> None:
    """Makes drafts that learn see nothing after the tokens of their own rank from now on."""
    training_pass = Eagle3Network.training_pass

    def short_sighted(network: Eagle3Network, inputs: DraftInputs, *others: Any) -> Eagle3Pass:
        num_own = len(inputs.positions[inputs.shard.own])
        rows = torch.arange(len(inputs.embedded)).clamp(max=max(0, num_own - 1))
        return training_pass(network, replace(inputs, embedded=inputs.embedded[rows]), *others)

    Eagle3Network.training_pass = short_sighted

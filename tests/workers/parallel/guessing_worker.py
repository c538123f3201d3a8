"""A worker that tells what each rank has sampled, and whose ranks can be made to guess otherwise, or for themselves."""

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.protocol.calls import SamplingSlice, SliceResult
from trainhouse.workers.sampler.rank_sync import RankSync, VerifyResult
from trainhouse.workers.sampler.speculation import DraftTokens, SpeculativeDecoder
from trainhouse.workers.state.trainable import FORWARD_VECTORS

from .watched_worker import ERRORS, WatchedWorker

GUESSING = "trainhouse.tests.workers.parallel.guessing_worker:GuessingWorker"


class GuessingWorker(WatchedWorker):
    def _load(self, mesh: Mesh) -> None:
        super()._load(mesh)
        self._sampled: dict[str, list[list[int]]] = {}
        self._num_overruled = 0
        self._of_base = self._sampler._of_base
        self._together = self._of_base._together
        same, verified = self._together.from_leader, self._together.agree_on_verified

        def counted_same(integers: Tensor) -> Tensor:
            own = integers.clone()
            told = same(integers)
            self._num_overruled += int((told != own).sum())
            return told

        def counted_verified(own: Sequence[VerifyResult]) -> list[VerifyResult]:
            told = verified(own)
            self._num_overruled += sum(mine != theirs for mine, theirs in zip(own, told, strict=True))
            return told

        vars(self._together).update(from_leader=counted_same, agree_on_verified=counted_verified)

    def sample_slice(self, work: SamplingSlice) -> SliceResult:
        result = super().sample_slice(work)
        for job_id, answer in self._of_base._finished.items():
            if isinstance(answer, SampleResponse):
                self._sampled[job_id] = [each.tokens.tolist() for each in answer.sequences]
        return result

    def sampled(self) -> dict[str, list[list[int]]]:
        """By job, the tokens of its samples as this rank has them, since it was last asked."""
        found, self._sampled = self._sampled, {}
        return found

    def num_overruled(self) -> int:
        """How many guesses and decisions of this rank were others than the first's, since it was last asked."""
        number, self._num_overruled = self._num_overruled, 0
        return number

    def disturb(self, rank: int, draft_id: str) -> None:
        """From now on that rank's draft has other weights. They count as changed on all, which find nothing kept."""
        with self._models.resident([draft_id], FORWARD_VECTORS) as (draft,):
            noise = torch.randn(draft.weights.shape, generator=torch.Generator().manual_seed(1))
            draft.weights.add_(noise, alpha=float(self._mesh.rank == rank))

    def decide_alone(self, decision: str) -> None:
        """From now on each rank takes its own answers of this method of RankSync; "" = of none."""
        for name in ("from_leader", "agree_on_verified"):
            own = getattr(RankSync, name).__get__(self._together) if name != decision else _own
            setattr(self._together, name, own)

    def break_guessing(self, rank: int, error: str) -> None:
        """From now on one of ERRORS where that rank's drafts are to guess."""
        if self._mesh.rank == rank:
            self._of_base._speculation.propose = mock.Mock(side_effect=ERRORS[error])

    def know(self, texts: Mapping[str, Sequence[int]]) -> None:
        """From now on drafts guess the tokens of these, by job; prompts are among them. Of none: by themselves."""

        def perfect(draft: Any, rows: list[Any], num: int, table: Any) -> list[DraftTokens]:
            found = as_drawn(draft, rows, num, table)
            for each, row in zip(found, rows, strict=True):
                first = int(table.length[row.table_row])
                each.tokens[:] = texts[row.job.request.job_id][first : first + num]
                assert each.probabilities is not None
                each.probabilities.zero_()[np.arange(num), each.tokens] = 1
            return found

        as_drawn = SpeculativeDecoder._propose_group.__get__(self._of_base._speculation)
        self._of_base._speculation._propose_group = perfect if texts else as_drawn


def _own(answers: Any) -> Any:
    return answers

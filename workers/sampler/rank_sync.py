"""Lets ranks that decode the same sequences, each with its part of the model, follow the first rank's decisions."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..parallel.mesh import Mesh
from ..protocol.calls import Failure
from .logits.token_choice import ChosenTokens, VerifyResult


@dataclass(frozen=True)
class RankFailures:
    """Reports what a rank could not load.

    failures: of jobs, by id. missing_drafts: drafts that could not be loaded to the device.
    """

    failures: Mapping[str, Failure]
    missing_drafts: frozenset[str]


class RankSync:
    """Makes the ranks of a team decide alike.

    is_leader: true on the rank that returns results.
    exchange_in_passes: whether passes of the model exchange tensors between ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._team = mesh.along("ep", "tp")
        self.is_leader = self._team.index == 0
        self.exchange_in_passes = mesh.has_forward_collectives

    def merge_failures(self, own: RankFailures) -> RankFailures:
        """Merges the failures of the ranks that decode with this one. A collective: all ranks must call it."""
        if self._team.size == 1:
            return own
        of_all = self._mesh.all_gather_object(own)
        of_team = [of_all[rank] for rank in self._team.ranks]
        failures = {job_id: failure for each in of_team for job_id, failure in each.failures.items()}
        return RankFailures(failures, frozenset().union(*(each.missing_drafts for each in of_team)))

    def is_over(self, deadline: float) -> bool:
        """True if the deadline has passed by the first rank's clock."""
        is_over = time.monotonic() >= deadline
        if self._team.size == 1:
            return is_over
        return bool(self._team.broadcast(torch.tensor([is_over], dtype=torch.uint8)))

    def from_leader(self, integers: Tensor) -> Tensor:
        """Returns the first rank's values."""
        return integers if self._team.size == 1 else self._team.broadcast(integers)

    def agree_on_verified(self, own: Sequence[VerifyResult]) -> list[VerifyResult]:
        """Returns the first rank's values for the same sequences."""
        if self._team.size == 1:
            return list(own)
        agreed = self._team.broadcast(torch.tensor([(each.num_accepted, each.token) for each in own]))
        return [VerifyResult(num_accepted, token) for num_accepted, token in agreed.tolist()]

    def agree_on_tokens(self, chosen: ChosenTokens) -> ChosenTokens:
        """Returns the first rank's tokens: a token that differed on another rank would make its sequence diverge."""
        if self._team.size == 1:
            return chosen
        return replace(chosen, tokens=self._team.broadcast(chosen.tokens))

"""Together: ranks that decode the same samples, each with its part of the model, decide as the first of them does."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..parallel.mesh import Mesh
from ..protocol.verbs import Failure
from .logits.choice import Chosen


@dataclass(frozen=True)
class Verified:
    """Of a row: how many of its guesses are right, and the token behind them."""

    num_accepted: int
    token: int


@dataclass(frozen=True)
class Trouble:
    """failures: of jobs, by id. lacking: drafts that did not come to the device."""

    failures: Mapping[str, Failure]
    lacking: frozenset[str]


class Together:
    """speaks: whether this rank's answers count."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._team = mesh.along("ep", "tp")
        self.speaks = self._team.index == 0

    def trouble(self, own: Trouble) -> Trouble:
        """Of those that decode with this one. All ask at once, whatever they decode."""
        if self._team.size == 1:
            return own
        of_all = self._mesh.exchange(own)
        told = [of_all[rank] for rank in self._team.ranks]
        failures = {job_id: failure for each in told for job_id, failure in each.failures.items()}
        return Trouble(failures, frozenset().union(*(each.lacking for each in told)))

    def is_over(self, deadline: float) -> bool:
        """Whether the time has come, by the first rank's clock."""
        is_over = time.monotonic() >= deadline
        if self._team.size == 1:
            return is_over
        return bool(self._team.from_first(torch.tensor([is_over], dtype=torch.uint8)))

    def same(self, integers: Tensor) -> Tensor:
        """The first rank's."""
        return integers if self._team.size == 1 else self._team.from_first(integers)

    def verified(self, own: Sequence[Verified]) -> list[Verified]:
        """The first rank's, of the same rows."""
        if self._team.size == 1:
            return list(own)
        told = self._team.from_first(torch.tensor([(each.num_accepted, each.token) for each in own]))
        return [Verified(num_accepted, token) for num_accepted, token in told.tolist()]

    def agreed(self, chosen: Chosen) -> Chosen:
        """The first rank's tokens: were a single one another elsewhere, its sequence would go apart for good."""
        if self._team.size == 1:
            return chosen
        return replace(chosen, tokens=self._team.from_first(chosen.tokens))

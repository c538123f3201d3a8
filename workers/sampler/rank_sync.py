"""Lets ranks that decode the same sequences, each with its part of the model, follow the first rank's decisions."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ..parallel.mesh import Mesh
from .requests.token_choice import ChosenTokens, VerifyResult

_T = TypeVar("_T")


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

    def gathered(self, own: _T) -> list[_T]:
        """Returns the values of the ranks that decode with this one. A collective: all ranks must call it."""
        if self._team.size == 1:
            return [own]
        of_all = self._mesh.all_gather_object(own)
        return [of_all[rank] for rank in self._team.ranks]

    def is_over(self, deadline: float) -> bool:
        """True if the deadline has passed by the first rank's clock."""
        is_over = time.monotonic() >= deadline
        if self._team.size == 1:
            return is_over
        return bool(self._team.broadcast(torch.tensor([is_over], dtype=torch.uint8)))

    def from_leader(self, integers: Tensor) -> Tensor:
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

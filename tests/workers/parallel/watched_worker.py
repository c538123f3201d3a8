"""A worker that counts its micro-batches, and does on demand what ranks of a layout must not."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from trainhouse.workers import optim
from trainhouse.workers.lora import Adapter
from trainhouse.workers.optim import add_up
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.verbs import Failure, Step
from trainhouse.workers.worker import Worker

WATCHED = "trainhouse.tests.workers.parallel.watched_worker:WatchedWorker"


def _averaged(adapters: Sequence[Adapter], mesh: Mesh) -> None:
    add_up(adapters, mesh)
    for adapter in adapters:
        for axis, region in adapter.layout.regions.items():
            adapter.accumulator[region] /= mesh.beside(axis).size


def _left_alone(adapters: Sequence[Adapter], mesh: Mesh) -> None:
    pass


# What becomes of the gradients of all ranks at a step.
RULES = {"sum": add_up, "mean": _averaged, "own": _left_alone}

ERRORS = {
    "raised": RuntimeError("broken"),
    "out of memory": torch.OutOfMemoryError("no memory for 1 TiB"),
}


class WatchedWorker(Worker):
    def _load(self, mesh: Mesh) -> None:
        super()._load(mesh)
        self._rule, self._error = "sum", ""
        self._num_micro_batches = 0
        run = self._base.shared_hidden_states

        def watched(*arguments: Any) -> Tensor:
            self._num_micro_batches += 1
            if self._error:
                raise ERRORS[self._error]
            return run(*arguments)

        self._base.shared_hidden_states = watched

    def apply_steps(self, steps: tuple[Step, ...]) -> tuple[dict[str, float] | Failure, ...]:
        with mock.patch.object(optim, "add_up", RULES[self._rule]):
            return super().apply_steps(steps)

    def follow(self, rule: str) -> None:
        """One of RULES, from now on."""
        self._rule = rule

    def fail(self, rank: int, error: str) -> None:
        """From now on one of ERRORS in each pass of that rank; "" = none."""
        self._error = error if self._mesh.rank == rank else ""

    def cut_micro_batches(self, most_tokens: int) -> None:
        """From now on none has more tokens, unless a single sequence has."""
        self._program._token_budget = most_tokens

    def num_micro_batches(self) -> int:
        """That were run since the last time it was asked."""
        number, self._num_micro_batches = self._num_micro_batches, 0
        return number

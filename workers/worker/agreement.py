"""Runs a step on all ranks, or fails it on all of them."""

from collections.abc import Callable
from typing import TypeVar

from ..parallel.mesh import Mesh
from ..protocol.calls import Failure

Result = TypeVar("Result")


class RankAgreement:
    """All ranks call a method together.

    No rank continues to wait for one that failed, and none seems to have done what others have not.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def on_all(self, act: Callable[[], Result]) -> Result:
        """Runs `act` on this rank; if it fails on one rank, it fails on all."""
        done: list[Result] = []
        failed: Exception | None = None
        try:
            done.append(act())
        except Exception as error:
            failed = error
        [failure] = self._mesh.first_values([None if failed is None else Failure.of(failed)])
        if failed is not None:
            raise failed
        if failure is not None:
            raise failure.error()
        return done[0]

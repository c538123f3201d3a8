"""Runs a step on all ranks, or fails it on all of them."""

from collections.abc import Callable
from typing import TypeVar

from ..parallel.mesh import Mesh
from ..protocol.calls import Failure

T = TypeVar("T")


class RankAgreement:
    """All ranks call a method together.

    No rank continues to wait for one that failed, and none seems to have done what others have not.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def on_all(self, act: Callable[[], T]) -> T:
        """Runs `act` on this rank; if it fails on one rank, it fails on all."""
        done: list[T] = []
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

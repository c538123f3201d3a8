"""Turns of requests at the weights of one vLLM, which has one model's weights at a time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Weights = TypeVar("Weights")


class Turns(Generic[Weights]):
    """Requests for the same weights run together. Others wait until these have ended, and so do new ones meanwhile."""

    def __init__(self) -> None:
        self._weights: Weights | None = None
        self._num_running = self._num_waiting = 0
        self._all_ended: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def turn(self, choose: Callable[[], Weights]) -> AsyncIterator[None]:
        """Waits for the turn of the weights, which lasts to the end of the block.

        Args:
            choose: returns the weights, and is called again after waiting, because there may be newer ones. What it
                raises ends the wait. Nothing else runs between its last call and the block.
        """
        await self._enter(choose)
        try:
            yield
        finally:
            self._num_running -= 1
            self._wake()

    async def _enter(self, choose: Callable[[], Weights]) -> None:
        weights, has_waited = choose(), False
        try:
            while not self._is_turn_of(weights, has_waited):
                self._num_waiting += not has_waited
                has_waited = True
                self._all_ended = self._all_ended or asyncio.get_running_loop().create_future()
                await asyncio.shield(self._all_ended)
                weights = choose()
        except BaseException:
            self._num_waiting -= has_waited
            self._wake()
            raise
        self._num_waiting -= has_waited
        self._num_running += 1
        self._weights = weights

    def _is_turn_of(self, weights: Weights, has_waited: bool) -> bool:
        """A request that arrives while others wait must wait too, or they would wait forever."""
        if self._num_waiting and not has_waited:
            return False
        return not self._num_running or self._weights == weights

    def _wake(self) -> None:
        if not self._num_running and self._all_ended is not None:
            self._all_ended.set_result(None)
            self._all_ended = None

"""Weights are loaded once for all that need them, again after a crash, and dropped with their last holder."""

import asyncio
from collections.abc import Sequence

import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.server.sampling.worker_weights import WorkerWeights
from trainhouse.workers.protocol.calls import WorkerLost
from trainhouse.workers.scheduler.quarantine import MAX_STRIKES

pytestmark = pytest.mark.anyio

CRASH = WorkerLost("the worker died", alone=True)


class Weights(WorkerWeights[str]):
    """Items are their ids. failures: of the next loads. events: what the workers did, in order."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__()
        self.failures = list(failures)
        self.events: list[str] = []
        self.held: set[str] = set()
        self.may_change = asyncio.Event()
        self.may_change.set()

    def id_of(self, item: str) -> str:
        return item

    def name_of(self, item: str) -> str:
        return f"weights {item}"

    def is_loaded(self, item: str) -> bool:
        return item in self.held

    async def load_now(self, item: str) -> None:
        self.events.append(f"load {item}")
        await self.may_change.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.held.add(item)

    async def drop_now(self, item: str) -> None:
        self.events.append(f"drop {item}")
        await self.may_change.wait()
        self.held.discard(item)


async def settle() -> None:
    await asyncio.sleep(0.02)


async def load_together(weights: Weights, number: int) -> Sequence[BaseException | None]:
    return await asyncio.gather(*(weights.load("a") for _ in range(number)), return_exceptions=True)


async def test_concurrent_callers_share_a_load_and_later_ones_need_none() -> None:
    weights = Weights()
    weights.hold("a", "sampler")
    assert await load_together(weights, 3) == [None] * 3
    await weights.load("a")
    assert weights.events == ["load a"]
    weights.held.clear()  # a crash
    await weights.load("a")
    assert weights.events == ["load a"] * 2


async def test_a_failed_load_fails_for_all_its_callers_and_is_not_kept() -> None:
    weights = Weights(OperationError("damaged"))
    weights.hold("a", "sampler")
    assert [str(each) for each in await load_together(weights, 3)] == ["damaged"] * 3
    assert await load_together(weights, 3) == [None] * 3
    assert weights.events == ["load a"] * 2


async def test_a_load_that_kills_workers_is_given_up_for_all_its_callers() -> None:
    """Together they kill as many as one request may."""
    weights = Weights(*[CRASH] * 10)
    weights.hold("a", "sampler")
    errors = await load_together(weights, 4)
    assert all("died 3 times while running only the load of weights a" in str(each) for each in errors)
    assert len(weights.events) == MAX_STRIKES


async def test_weights_are_dropped_with_their_last_holder_and_not_loaded_for_none() -> None:
    weights = Weights()
    for holder in ("one", "two", "two"):
        weights.hold("a", holder)
    await weights.load("a")
    weights.release("a", "two")
    await settle()
    assert weights.held == {"a"}
    weights.release("a", "one")
    await settle()
    assert weights.events == ["load a", "drop a"] and not weights.held
    await weights.load("a")
    assert weights.events == ["load a", "drop a"], "nothing holds them"


async def test_unused_weights_are_kept_for_a_while() -> None:
    weights = Weights()
    for seconds in (3600.0, 0.05):
        weights.hold("a", "request")
        await weights.load("a")
        weights.release("a", "request", seconds)
        await settle()
        assert weights.events == ["load a"]
    await asyncio.sleep(0.1)
    assert weights.events == ["load a", "drop a"]


async def test_weights_that_are_being_dropped_are_loaded_again_before_they_are_used() -> None:
    weights = Weights()
    weights.hold("a", "first")
    await weights.load("a")
    weights.may_change.clear()
    weights.release("a", "first")
    await settle()
    weights.hold("a", "second")
    loading = asyncio.create_task(weights.load("a"))
    await settle()
    assert weights.events == ["load a", "drop a"] and not loading.done()
    weights.may_change.set()
    await loading
    assert weights.events == ["load a", "drop a", "load a"] and weights.held == {"a"}


async def test_a_cancelled_caller_does_not_end_the_load() -> None:
    weights = Weights()
    weights.hold("a", "sampler")
    weights.may_change.clear()
    cancelled, other = (asyncio.create_task(weights.load("a")) for _ in range(2))
    await settle()
    cancelled.cancel()
    weights.may_change.set()
    await other
    assert weights.events == ["load a"] and cancelled.cancelled()
    await weights.close()

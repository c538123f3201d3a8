"""Requests take turns at the weights that one vLLM has."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from trainhouse.workers.engines.vllm.adapters import Turns

pytestmark = pytest.mark.anyio


@dataclass
class Requests:
    """Starts requests, and records which weights they run with, in order."""

    turns: Turns[str] = field(default_factory=Turns)
    running: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    ends: dict[str, asyncio.Event] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def start(self, name: str, choose: Callable[[], str]) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, choose))
        await settle()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await settle()

    async def _run(self, name: str, choose: Callable[[], str]) -> None:
        async with self.turns.turn(choose):
            weights = choose()
            self.begun.append(f"{name}:{weights}")
            self.running.append(weights)
            assert len(set(self.running)) == 1
            try:
                await self.ends[name].wait()
            finally:
                self.running.remove(weights)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def always(weights: str) -> Callable[[], str]:
    return lambda: weights


async def test_requests_for_the_same_weights_run_together_and_others_in_order_of_arrival() -> None:
    requests = Requests()
    for name, weights in (("1", "a"), ("2", "a"), ("3", "b"), ("4", "a"), ("5", "c"), ("6", "b")):
        await requests.start(name, always(weights))
    assert requests.begun == ["1:a", "2:a"], "the fourth must not pass the third, which would wait forever"
    await requests.end("1")
    assert len(requests.begun) == 2
    await requests.end("2")
    assert requests.begun[2:] == ["3:b", "6:b"]
    for name in ("3", "6"):
        await requests.end(name)
    assert requests.begun[4:] == ["4:a"]
    await requests.end("4")
    await requests.end("5")
    assert requests.begun[5:] == ["5:c"]


async def test_a_waiting_request_takes_the_newest_weights() -> None:
    requests, newest = Requests(), ["a1"]
    await requests.start("1", lambda: newest[0])
    newest[0] = "a2"
    await requests.start("2", lambda: newest[0])
    newest[0] = "a3"
    await requests.start("3", lambda: newest[0])
    await requests.end("1")
    assert requests.begun == ["1:a1", "2:a3", "3:a3"]
    await requests.end("2")
    await requests.end("3")


async def test_cancelled_requests_and_those_without_weights_leave_the_turn_to_others() -> None:
    requests, is_gone = Requests(), [False]

    def choose() -> str:
        if is_gone[0]:
            raise KeyError("gone")
        return "b"

    await requests.start("1", always("a"))
    await requests.start("cancelled", always("b"))
    await requests.start("gone", choose)
    await requests.start("4", always("c"))
    requests.tasks["cancelled"].cancel()
    is_gone[0] = True
    await requests.end("1")
    assert requests.begun == ["1:a", "4:c"]
    with pytest.raises(KeyError):
        await requests.tasks["gone"]
    await requests.start("5", always("d"))
    requests.tasks["4"].cancel()
    await settle()
    assert requests.begun[2:] == ["5:d"]
    await requests.end("5")


async def test_a_request_may_be_cancelled_when_its_turn_begins() -> None:
    """The requests after it do not wait for its turn."""
    requests = Requests()
    await requests.start("1", always("a"))
    await requests.start("2", always("b"))
    requests.ends["1"].set()
    await requests.tasks["1"]
    requests.tasks["2"].cancel()
    await requests.start("3", always("c"))
    assert requests.begun == ["1:a", "3:c"]
    await requests.end("3")

"""The work that causes crashes is found: suspects are soon run alone, and nothing else waits for that."""

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine

import pytest
from trainhouse.workers.scheduler.quarantine import MAX_STRIKES, Quarantine, Suspects


def test_a_member_of_the_fatal_call_is_a_suspect_until_it_is_past_it() -> None:
    suspects = Suspects()
    assert not suspects and suspects.max_together(["a"]) == math.inf
    suspects.accuse({"a": 7, "b": 3})
    assert suspects and "a" in suspects and "c" not in suspects
    for position in (5, 6):
        suspects.record_progress("a", position)
        assert "a" in suspects
    suspects.record_progress("a", 7)
    assert "a" not in suspects and "b" in suspects
    suspects.pop("b", None)
    assert not suspects


def test_an_unknown_position_makes_a_suspect_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("trainhouse.workers.scheduler.quarantine.time.monotonic", lambda: now)
    suspects = Suspects()
    suspects.accuse({"a": None, "b": 7})
    suspects.record_progress("a", 100)
    suspects.record_progress("b", None)
    assert "a" in suspects and "b" in suspects
    now += 600
    suspects.record_progress("a", 100)
    suspects.record_progress("b", None)
    assert not suspects


def test_a_suspect_that_never_returns_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("trainhouse.workers.scheduler.quarantine.time.monotonic", lambda: now)
    suspects = Suspects()
    suspects.accuse({"a": 1})
    now += 1800
    suspects.accuse({"b": 1})
    assert "a" in suspects
    now += 3000
    suspects.accuse({"c": 1})
    assert "a" not in suspects and "b" in suspects and "c" in suspects


def test_groups_of_suspects_shrink_to_one_and_never_below() -> None:
    suspects = Suspects(shrinks=4)
    group_size = 64
    for expected in (16, 4, 1, 1):
        suspects.accuse({str(number): 0 for number in range(group_size)})
        group_size = int(suspects.max_together(["0", "innocent"]))
        assert group_size == expected
    assert suspects.max_together(["innocent"]) == math.inf
    assert suspects.max_together(["0", "40"]) == 1 and suspects.max_together(["40"]) == 16


def test_suspects_run_alone_by_default() -> None:
    suspects = Suspects()
    suspects.accuse({str(number): 0 for number in range(64)})
    assert suspects.max_together(["0"]) == 1


# --- requests of a server that schedules them itself ---


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


class Server:
    """A server that dies of any culprit that runs on it, long before the others end."""

    def __init__(self, *culprits: str) -> None:
        self.quarantine = Quarantine("the server")
        self.culprits = culprits
        self.num_strikes: Counter[str] = Counter()
        self.running: set[str] = set()
        self.num_deaths = self.most_at_once = 0
        self._death = asyncio.get_running_loop().create_future()

    async def attempt(self, name: str, seconds: float = 0.3) -> bool:
        """Returns True if the request ran to its end."""
        async with self.quarantine.admitted(name):
            with self.quarantine.running(name):
                self.running.add(name)
                self.most_at_once = max(self.most_at_once, len(self.running))
                death = self._death
                try:
                    await asyncio.wait({death}, timeout=0.02 if name in self.culprits else seconds)
                finally:
                    self.running.discard(name)
                if not death.done() and name in self.culprits:
                    self.die()
            if death.done():
                self.num_strikes[name] += self.quarantine.record_crash(name)
            return not death.done()

    async def until_done(self, name: str, seconds: float = 0.3) -> None:
        try:
            while self.num_strikes[name] < MAX_STRIKES and not await self.attempt(name, seconds):
                pass
        finally:
            self.quarantine.clear(name)

    def die(self) -> None:
        self.num_deaths += 1
        self.running.clear()
        self._death.set_result(None)
        self._death = asyncio.get_running_loop().create_future()


async def after_a_death(server: Server, num_requests: int) -> list[asyncio.Task[None]]:
    """Returns endless requests that were running at a death of the server and have been retried."""
    works = [asyncio.create_task(server.until_done(f"early {n}", 1000)) for n in range(num_requests)]
    await asyncio.sleep(0.01)
    server.die()
    await asyncio.sleep(0.01)
    return works


async def cancel_all(works: list[asyncio.Task[None]]) -> None:
    for each in works:
        each.cancel()
    await asyncio.wait(works)


def test_suspect_requests_run_in_smaller_groups_and_finally_alone() -> None:
    async def check() -> None:
        names = [str(number) for number in range(20)]
        server = Server("7")

        async def all_attempt() -> int:
            server.most_at_once = 0
            await asyncio.gather(*map(server.attempt, names))
            return server.most_at_once

        assert [await all_attempt() for _ in range(2)] == [20, 5] and not server.num_strikes.total()
        for _ in range(3):
            await all_attempt()
        assert server.num_strikes["7"] == server.num_strikes.total() == 3

    run(check())


def test_new_requests_overtake_waiting_suspects() -> None:
    async def check() -> None:
        server = Server()
        works = await after_a_death(server, 3)
        assert server.quarantine.num_waiting == 2 and not server.num_strikes.total()
        for _ in range(3):
            await asyncio.wait_for(server.until_done("new"), 10)
        assert server.quarantine.num_waiting == 2
        await cancel_all(works)
        assert not server.quarantine.num_waiting and not server.running

    run(check())


def test_later_requests_get_no_strikes_and_the_culprit_is_found() -> None:
    """Later requests cost one more death, after which the culprit runs alone."""

    async def check() -> None:
        server = Server("early 0")
        early = asyncio.gather(*(server.until_done(f"early {number}") for number in range(4)))
        later: list[asyncio.Task[None]] = []
        while not early.done():
            later.append(asyncio.create_task(server.until_done(f"later {len(later)}", 0.06)))
            await asyncio.sleep(0.01)
        await asyncio.wait(later)
        assert server.num_strikes["early 0"] == server.num_strikes.total() == MAX_STRIKES
        assert len(later) > 3 and server.num_deaths <= 2 + MAX_STRIKES

    run(check())


@pytest.mark.slow
def test_later_culprit_is_found_while_others_are_suspects() -> None:
    async def check() -> None:
        server = Server("culprit")
        works = await after_a_death(server, 3)
        await server.until_done("culprit")
        assert server.num_strikes["culprit"] == server.num_strikes.total() == MAX_STRIKES
        await cancel_all(works)

    run(check())


def test_suspect_request_is_cleared_after_it_outlives_the_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other suspects then run, too, however long it continues."""
    monkeypatch.setattr("trainhouse.workers.scheduler.quarantine._MARGIN_SECONDS", 0.05)

    async def check() -> None:
        server = Server()
        works = await after_a_death(server, 3)
        assert server.quarantine.num_waiting == 2
        while server.quarantine.num_waiting:  # noqa: ASYNC110 (no event to wait for)
            await asyncio.sleep(0.01)
        await cancel_all(works)

    run(check())


def test_cancelled_suspects_do_not_block_others() -> None:
    """After the second death the only suspect may run only alone, until it is cancelled."""

    async def check() -> None:
        server = Server()
        suspects = await after_a_death(server, 2)
        others = [asyncio.create_task(server.until_done(f"other {number}", 1000)) for number in range(2)]
        await asyncio.sleep(0.01)
        assert len(server.running) == 3
        server.die()
        await asyncio.sleep(0.01)
        assert len(server.running) == 1 and server.quarantine.num_waiting == 3
        await cancel_all(suspects)
        await asyncio.sleep(0.01)
        assert len(server.running) == 2 and not server.quarantine.num_waiting
        await cancel_all(others)

    run(check())

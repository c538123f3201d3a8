"""Quarantine: the request that kills a server is found among those that ran, and no other request waits for that."""

import asyncio
from collections.abc import Coroutine

import pytest
from trainhouse.workers.engines.quarantine import MOST_STRIKES, Quarantine, SuspectState


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


class Server:
    """A server that dies of any culprit that runs on it, long before the others end."""

    def __init__(self, *culprits: SuspectState) -> None:
        self.company = Quarantine("the server")
        self.culprits = culprits
        self.num_deaths = 0
        self.most_at_once = 0
        self._death = asyncio.get_running_loop().create_future()

    async def attempt(self, standing: SuspectState, seconds: float = 0.3) -> bool:
        """Returns True if the request ran to its end."""
        async with self.company.admitted(standing):
            self.most_at_once = max(self.most_at_once, len(self.company._admitted))
            async with self.company.running(standing):
                death = self._death
                await asyncio.wait({death}, timeout=0.02 if standing in self.culprits else seconds)
                if not death.done() and standing in self.culprits:
                    self.die()
            if death.done():
                self.company.record_crash(standing)
            return not death.done()

    async def until_done(self, standing: SuspectState, seconds: float = 0.3) -> None:
        while standing.num_strikes < MOST_STRIKES and not await self.attempt(standing, seconds):
            pass
        self.company._clear(standing)

    def die(self) -> None:
        self.num_deaths += 1
        self._death.set_result(None)
        self._death = asyncio.get_running_loop().create_future()


def test_suspects_run_in_smaller_groups_and_finally_alone() -> None:
    async def check() -> None:
        standings = [SuspectState() for _ in range(20)]
        server = Server(culprit := standings[7])

        async def all_attempt() -> int:
            server.most_at_once = 0
            await asyncio.gather(*map(server.attempt, standings))
            return server.most_at_once

        assert [await all_attempt() for _ in range(2)] == [20, 5]
        suspects = [each for each in standings if each.max_concurrent_suspects == 1]
        assert culprit in suspects and len(suspects) == 5 and not any(each.num_strikes for each in standings)
        for _ in range(3):
            await all_attempt()
        assert culprit.num_strikes == 3 and sum(each.num_strikes for each in standings) == 3

    run(check())


def test_new_requests_overtake_waiting_suspects() -> None:
    async def check() -> None:
        standings = [SuspectState() for _ in range(3)]
        server = Server()
        works = [asyncio.create_task(server.until_done(each, 1000)) for each in standings]
        await asyncio.sleep(0.01)
        server.die()
        await asyncio.sleep(0.01)
        assert server.company.num_waiting == 2 and not any(each.num_strikes for each in standings)
        for _ in range(3):
            await asyncio.wait_for(server.until_done(SuspectState()), 10)
        assert server.company.num_waiting == 2
        for each in works:
            each.cancel()
        await asyncio.wait(works)
        assert not server.company.num_waiting and not server.company._admitted

    run(check())


def test_later_requests_get_no_strikes_and_the_culprit_is_found() -> None:
    """Later requests cost one more death, after which the culprit runs alone."""

    async def check() -> None:
        early, later = [SuspectState() for _ in range(4)], list[SuspectState]()
        server = Server(culprit := early[0])
        early_works, working = asyncio.gather(*map(server.until_done, early)), list[asyncio.Task[None]]()

        async def keep_submitting() -> None:
            while not early_works.done():
                later.append(SuspectState())
                working.append(asyncio.create_task(server.until_done(later[-1], 0.06)))
                await asyncio.sleep(0.01)

        submitting = asyncio.create_task(keep_submitting())
        await early_works
        await submitting
        await asyncio.wait(working)
        assert culprit.num_strikes == MOST_STRIKES and not any(each.num_strikes for each in [*early[1:], *later])
        assert len(later) > 3 and server.num_deaths <= 2 + MOST_STRIKES

    run(check())


def test_later_culprit_is_found_while_others_are_suspects() -> None:
    async def check() -> None:
        early = [SuspectState() for _ in range(3)]
        server = Server(culprit := SuspectState())
        works = [asyncio.create_task(server.until_done(each, 0.5)) for each in early]
        await asyncio.sleep(0.01)
        server.die()
        await asyncio.sleep(0.01)
        await server.until_done(culprit)
        await asyncio.gather(*works)
        assert culprit.num_strikes == MOST_STRIKES and not any(each.num_strikes for each in early)

    run(check())


def test_suspect_is_cleared_after_it_outlives_the_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other suspects then run, too, however long it continues."""
    monkeypatch.setattr("trainhouse.workers.engines.quarantine._MARGIN_SECONDS", 0.05)

    async def check() -> None:
        standings = [SuspectState() for _ in range(3)]
        server = Server()
        works = [asyncio.create_task(server.until_done(each, 1000)) for each in standings]
        await asyncio.sleep(0.01)
        server.die()
        await asyncio.sleep(0.01)
        assert server.company.num_waiting == 2
        while server.company.num_waiting:  # noqa: ASYNC110 (no event to wait for)
            await asyncio.sleep(0.01)
        for each in works:
            each.cancel()
        await asyncio.wait(works)

    run(check())


def test_cancelled_suspects_do_not_block_others() -> None:
    async def check() -> None:
        server = Server()
        one, other = SuspectState(), SuspectState()
        works = [asyncio.create_task(server.until_done(each, 1000)) for each in (one, other)]
        for together in (2, 2):
            await asyncio.sleep(0.01)
            assert server.most_at_once == together
            server.die()
            await asyncio.sleep(0)
        for each in works:
            each.cancel()
        await asyncio.wait(works)
        with server.company.track() as alone:
            server.company._alone = alone
            waiting = asyncio.create_task(server.until_done(SuspectState()))
            await asyncio.sleep(0.05)
            assert server.company.num_waiting == 1
        await waiting

    run(check())

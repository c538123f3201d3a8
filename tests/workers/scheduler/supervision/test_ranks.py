"""Tests that the ranks of a base model share data by tokens, and succeed or fail together."""

import asyncio
from collections.abc import Coroutine

import pytest
from trainhouse.tests.workers.echo_worker import ECHO, EchoConfig
from trainhouse.tests.workers.parallel.training import reinforced, supervised
from trainhouse.tests.workers.pools.test_pool import NewPool, new_pool, ray_cluster, ray_in_full
from trainhouse.workers.pools import base
from trainhouse.workers.pools.base import PoolSpec, WorkerDied
from trainhouse.workers.protocol.calls import OperationPart
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.scheduler.supervision.ranks import Ranks, idle_tokens, split_pass

__all__ = ["new_pool", "ray_cluster"]


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 200))


def test_data_are_split_evenly_by_tokens_each_once_and_in_order() -> None:
    work = (
        OperationPart(7, supervised("a", 1, 100, 3, 50, 50, 2)),
        OperationPart(8, reinforced("b", 1, 99, 1), last=False),
    )
    shares = split_pass(work, 3)
    tokens = [sum(len(datum.tokens) for part in share for datum in part.request.data) for share in shares]
    assert max(tokens) - min(tokens) <= 6 and sum(tokens) == 305
    for number, part in enumerate(work):
        numbers = [one for share in shares for one in share[number].data_share.indices]
        assert sorted(numbers) == list(range(len(part.request.data)))
        for share in shares:
            own = share[number]
            assert list(own.data_share.indices) == sorted(own.data_share.indices) and own.data_share.num_data == len(
                part.request.data
            )
            assert [part.request.data[one] for one in own.data_share.indices] == list(own.request.data)
            assert (own.work_number, own.last, own.request.loss_fn) == (
                part.work_number,
                part.last,
                part.request.loss_fn,
            )


def test_tokens_on_which_ranks_wait_are_those_that_shares_lack_to_the_longest() -> None:
    work = (OperationPart(7, supervised("a", 1, 100, 3, 50)),)
    assert idle_tokens(split_pass(work, 1)) == 0
    assert idle_tokens(split_pass(work, 2)) == 100 - 53
    assert idle_tokens(split_pass(work, 4)) == (100 - 50) + (100 - 3) + 100


def test_data_of_a_later_part_keep_their_indices() -> None:
    (share, _) = split_pass((OperationPart(7, supervised("a", 1, 5, 6), first_datum=40),), 2)
    assert list(share[0].data_share.indices) == [41]


@ray_in_full
@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fail_alone", "fail_alone failed on one of its ranks, the others waited for it: KeyError: 'broken'"),
        ("refuse_and_leave", "refuse_and_leave failed on one of its ranks, the others waited for it: refused"),
        ("refuse_alone", "rank 1 of 2 failed in refuse_alone, the others did not: refused"),
    ],
)
def test_ranks_with_different_outcomes_are_killed_together(
    new_pool: NewPool, method: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "GRACE_SECONDS", 2.0)

    async def check() -> None:
        pool = new_pool(PoolSpec(ECHO, (EchoConfig(0), EchoConfig(1))))
        await pool.start()
        ranks = Ranks(pool, ParallelSpec(replicas=2))
        try:
            assert await ranks.call("rank", hang_seconds=30) == 0
            assert len(ranks.pool.rank_times) == 2 and all(0 < each.seconds < 30 for each in ranks.pool.rank_times)
            with pytest.raises(WorkerDied, match="so it was killed") as death:
                await ranks.call(method, 1, hang_seconds=30)
            assert reason in str(death.value)
            with pytest.raises(WorkerDied):
                await ranks.call("rank", hang_seconds=30)
        finally:
            await ranks.close()

    run(check())

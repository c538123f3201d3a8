"""Backlog: reports are recorded later, in order, and soon enough."""

import asyncio
from functools import partial

import pytest
from trainhouse.server.telemetry.backlog import _MOST, _SECONDS, Backlog

pytestmark = pytest.mark.anyio


async def test_reports_are_recorded_in_order_after_a_moment() -> None:
    backlog, recorded = Backlog(), []
    for number in range(3):
        backlog.add(partial(recorded.append, number))
    assert recorded == []
    await asyncio.sleep(2 * _SECONDS)
    assert recorded == [0, 1, 2]
    backlog.add(partial(recorded.append, 3))
    await asyncio.sleep(2 * _SECONDS)
    assert recorded == [0, 1, 2, 3]


async def test_many_reports_are_not_kept_back() -> None:
    backlog, recorded = Backlog(), []
    for number in range(_MOST + 1):
        backlog.add(partial(recorded.append, number))
    assert recorded == list(range(_MOST))


async def test_a_report_that_fails_does_not_lose_those_after_it() -> None:
    backlog, recorded = Backlog(), []
    backlog.add(partial(int, "no number"))
    backlog.add(partial(recorded.append, 1))
    with pytest.raises(ValueError, match="no number"):
        backlog.work_off()
    backlog.work_off()
    assert recorded == [1]

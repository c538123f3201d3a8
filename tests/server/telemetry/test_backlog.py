"""Backlog: reports are recorded later, in order and soon enough, without blocking others or harming them."""

import asyncio
import logging
import time
from functools import partial
from pathlib import Path

import pytest
from trainhouse.server.telemetry import telemetry as module
from trainhouse.server.telemetry.telemetry import _BACKLOG_SECONDS, Backlog
from trainhouse.workers.dispatch import WorkerDispatch

from ..real import running_server, server_config

pytestmark = pytest.mark.anyio


async def test_reports_are_recorded_in_order_after_a_moment() -> None:
    backlog, recorded = Backlog(), []
    for number in range(3):
        backlog.add(partial(recorded.append, number))
    assert recorded == []
    await asyncio.sleep(2 * _BACKLOG_SECONDS)
    assert recorded == [0, 1, 2]
    backlog.add(partial(recorded.append, 3))
    await asyncio.sleep(2 * _BACKLOG_SECONDS)
    assert recorded == [0, 1, 2, 3]


async def test_reports_cannot_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_REPORTS", 10)
    backlog, recorded = Backlog(), []
    for number in range(15):
        backlog.add(partial(recorded.append, number))
    assert recorded == [0, 1, 2, 3, 4]


async def test_expensive_reports_do_not_block_others_for_long() -> None:
    """Two hundred reports of 1 ms would block the event loop for 200 ms in one turn."""
    backlog, recorded, blocked = Backlog(), [], 0.0

    def report(number: int) -> None:
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        recorded.append(number)

    for number in range(200):
        backlog.add(partial(report, number))
    async with asyncio.timeout(60):
        while len(recorded) < 200:
            before, since = len(recorded), time.thread_time()
            await asyncio.sleep(0)
            blocked = max(blocked, time.thread_time() - since)
            assert len(recorded) - before <= 10
    assert recorded == list(range(200)) and 0.001 < blocked < 0.05


async def test_a_reader_gets_all_reports_at_once_however_long_they_take() -> None:
    backlog, recorded = Backlog(), []

    def report(number: int) -> None:
        time.sleep(0.001)
        recorded.append(number)

    for number in range(20):
        backlog.add(partial(report, number))
    backlog.work_off()
    assert recorded == list(range(20))


async def test_a_report_that_fails_is_logged_and_those_after_it_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    backlog, recorded = Backlog(), []
    backlog.add(partial(int, "no number"))
    backlog.add(partial(recorded.append, 1))
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(2 * _BACKLOG_SECONDS)
    assert recorded == [1]
    (logged,) = caplog.records
    assert logged.exc_info and "no number" in str(logged.exc_info[1])


async def test_whoever_reports_does_not_see_that_an_earlier_report_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_REPORTS", 1)
    backlog, recorded = Backlog(), []
    backlog.add(partial(int, "no number"))
    for number in range(2):
        backlog.add(partial(recorded.append, number))
    assert recorded == [0]


@pytest.mark.slow
async def test_a_report_that_fails_at_shutdown_does_not_lose_those_after_it(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BACKLOG_SECONDS", 3600.0)
    recorded = []
    async with running_server(server_config(tiny_models["qwen3"], tmp_path / "state"), dispatch) as server:
        waiting = server.services.telemetry._backlog
        waiting.add(partial(int, "no number"))
        waiting.add(partial(recorded.append, 1))
    assert recorded == [1]

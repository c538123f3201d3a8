"""Captured features whose step is not finished when the server ends: held by the next one, each use counted once.

The workers are real ones.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.server.config.knobs import ServerConfig
from trainhouse.workers.dispatch import WorkerDispatch

from ..real import Run, Server, running_server
from ..runs.test_drafts import create_draft
from ..runs.test_pinned_checkpoints import until
from .test_features import LOSS, captured, config_of, files, learned, refused, some_data, stock

pytestmark = pytest.mark.anyio

USED_UP = "which it has had"


@pytest.fixture
def config(tiny_models: dict[str, Path], tmp_path: Path) -> ServerConfig:
    return config_of(tiny_models, tmp_path)


async def learn(draft: Run, data: list[dict[str, Any]]) -> None:
    assert "error" not in await learned(draft, data)


async def step(draft: Run) -> None:
    assert "error" not in await draft.optim_step()


async def held(server: Server) -> int:
    return (await stock(server))["num_held"]


@pytest.mark.parametrize("between", ["nothing", "a restart", "snapshots", "snapshots and more"])
async def test_uses_of_before_a_restart_are_taken_by_the_step_behind_it(
    config: ServerConfig, dispatch: WorkerDispatch, between: str
) -> None:
    """Also where the journal has nothing left of the operations that use them."""
    async with running_server(config, dispatch) as server:
        draft = await create_draft(server)
        data, later = [await captured(draft, some_data(seed), uses=2) for seed in (1, 2)]
        for batch in (data, later):
            await learn(draft, batch)
        await step(draft)
        await learn(draft, data)
        if between.startswith("snapshots"):
            await server.services.runs.settle(0)
            assert len(list((config.state_dir / "snapshots").glob("*/[0-9]*"))) == 2
        if between != "snapshots":
            await learn(draft, later)
    if between == "a restart":
        async with running_server(config, dispatch):
            pass
    async with running_server(config, dispatch) as server:
        draft.server = server
        assert await held(server) == (3 if between == "snapshots" else 6)
        await step(draft)
        assert (await stock(server))["num_sequences"] == (3 if between == "snapshots" else 0)
        assert USED_UP in await refused(draft, data)


async def test_uses_of_before_a_restart_are_not_there_for_others(
    config: ServerConfig, dispatch: WorkerDispatch
) -> None:
    async with running_server(config, dispatch) as server:
        draft, other = [await create_draft(server) for _ in range(2)]
        data = await captured(draft, some_data(1), uses=1)
        await learn(draft, data)
    async with running_server(config, dispatch) as server:
        draft.server = other.server = server
        assert "it has 1 uses left, 1 of them for operations before this one" in await refused(other, data)
        await step(draft)
        assert USED_UP in await refused(draft, data)


@pytest.mark.parametrize("restarts", [False, True])
async def test_what_failed_before_a_vocabulary_map_is_no_use_of_the_step_behind_it(
    config: ServerConfig, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """The map begins anew what the next step is to be made of."""

    async def broken(request: object) -> None:
        raise RuntimeError("out of order")

    async with AsyncExitStack() as servers:
        server = await servers.enter_async_context(running_server(config, dispatch))
        draft = await create_draft(server, draft_vocab_size=64)
        failing, later = [await captured(draft, some_data(seed), uses=1) for seed in (1, 2)]
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "forward_backward", broken)
            assert "internal error" in (await learned(draft, failing))["error"]
        assert await held(server) == 3
        assert "error" not in await draft.do("build_vocab_map", counts={"5": 1})
        assert await held(server) == 0
        await learn(draft, later)
        if restarts:
            await servers.aclose()
            draft.server = await servers.enter_async_context(running_server(config, dispatch))
        await step(draft)
        await learn(draft, failing)
        assert USED_UP in await refused(draft, later)


@pytest.mark.parametrize("meanwhile", ["released", "expired"])
async def test_what_an_unfinished_step_needs_is_held_by_the_next_server(
    config: ServerConfig, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """By each of the runs that need it."""
    async with running_server(config, dispatch) as server:
        draft, other = [await create_draft(server) for _ in range(2)]
        data = await captured(draft, some_data(1), ttl_seconds=None if meanwhile == "released" else 1)
        for each in (draft, other):
            await learn(each, data)
        if meanwhile == "released":
            await server.post("release_features", {"model_id": draft.model_id})
        accepted = await draft.submit("optim_step", adam_params={})
    if meanwhile == "expired":
        await asyncio.sleep(1)
    async with running_server(config, dispatch) as server:
        draft.server = other.server = server
        assert "error" not in await server.result(accepted["request_id"])
        found = await stock(server)
        assert (found["num_sequences"], found["num_held"], found["num_references"]) == (3, 3, 0)
        assert len(files(server)) == 6
        await step(other)
        assert (await stock(server))["num_sequences"] == 0 and files(server) == []


@pytest.mark.parametrize("dies", ["before", "behind"])
async def test_a_step_counts_once_wherever_the_server_dies_beside_the_count(
    config: ServerConfig, dispatch: WorkerDispatch, dies: str
) -> None:
    """Before the uses are taken, and when that is written but the step is not answered."""
    async with running_server(config, dispatch) as server:
        draft = await create_draft(server)
        data = await captured(draft, some_data(1), uses=2)
        await learn(draft, data)
        is_there = _stops_at_stepped(server, dies)
        accepted = await draft.submit("optim_step", adam_params={})
        await is_there.wait()
    async with running_server(config, dispatch) as server:
        draft.server = server
        await learn(draft, data)
        assert "error" not in await server.result(accepted["request_id"])
        assert (await stock(server))["num_sequences"] == 3
        await step(draft)
        assert (await stock(server))["num_sequences"] == 0
        assert USED_UP in await refused(draft, data)


def _stops_at_stepped(server: Server, dies: str) -> asyncio.Event:
    """The server gets no further there. Set as soon as it is there."""
    features, is_there = server.services.features, asyncio.Event()
    stepped: Callable[..., Awaitable[None]] = features.stepped

    async def stopping(*arguments: Any, **named: Any) -> None:
        if dies == "behind":
            await stepped(*arguments, **named)
        is_there.set()
        await asyncio.Event().wait()

    features.stepped = stopping
    return is_there


@pytest.mark.parametrize("fails", ["it broke", "it was not understood", "its batch is not whole"])
@pytest.mark.parametrize("has_snapshot", [False, True])
async def test_a_step_that_fails_takes_no_uses_and_lets_go_as_it_clears(
    config: ServerConfig, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch, fails: str, has_snapshot: bool
) -> None:
    """Whether the server restarts behind it or not: of what did not clear, the next step takes them."""
    async with running_server(config, dispatch) as server:
        draft = await create_draft(server)
        data = await captured(draft, some_data(1), uses=1)
        await learn(draft, data)
        clears = fails == "its batch is not whole"
        if clears:
            await draft.submit("forward_backward", status=400, data=[], loss_fn="eagle3")
        with monkeypatch.context() as patch:
            if fails == "it broke":
                patch.setattr(dispatch, "optim_step", _breaks)
            fields: dict[str, Any] = {"optimizer_params": {"type": "muon"}} if "understood" in fails else {}
            assert "error" in await draft.do("optim_step", **fields)
        if has_snapshot:
            await server.services.runs.settle(0)
        assert await held(server) == (0 if clears else 3)
    async with running_server(config, dispatch) as server:
        draft.server = server
        assert await held(server) == (0 if clears else 3)
        if clears:
            await learn(draft, data)
        await step(draft)
        assert (await stock(server))["num_sequences"] == 0


async def _breaks(_: object) -> object:
    raise OperationError("out of memory", "server")


async def test_what_was_only_looked_at_is_not_held_by_the_next_server(
    config: ServerConfig, dispatch: WorkerDispatch
) -> None:
    async with running_server(config, dispatch) as server:
        draft = await create_draft(server)
        data = await captured(draft, some_data(1))
        assert "error" not in await learned(draft, data, "forward")
        server.services.runs._runs[draft.model_id]._may_begin = lambda slot: False
        accepted = await draft.submit("forward", data=data, loss_fn="eagle3", loss_fn_config={"ttt_length": 3})
        assert await held(server) == 3
    async with running_server(config, dispatch) as server:
        assert "error" not in await server.result(accepted["request_id"])
        await until(lambda: server.services.features.stock().num_held == 0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
async def test_uses_are_counted_through_whatever_comes_between(
    config: ServerConfig, dispatch: WorkerDispatch, seed: int
) -> None:
    """Passes, steps that end well or clear, snapshots, and restarts, also with all of these under way."""
    random = Random(seed)
    left, waiting, batches = Counter(dict.fromkeys(range(3), 12)), Counter[int](), {}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_server(config, dispatch))
        draft = await create_draft(server)
        for number in left:
            batches[number] = await captured(draft, some_data(number, 2), uses=12)
        for _ in range(30):
            under_way, ends_well = [], random.random() < 0.7
            for _ in range(random.randrange(4)):
                number = random.randrange(3)
                if waiting[number] < left[number]:
                    waiting[number] += 1
                    under_way.append(await draft.submit("forward_backward", data=batches[number], **LOSS))
            is_step = random.random() < 0.5 and waiting.total() > 0
            if is_step and not ends_well:
                await draft.submit("forward_backward", status=400, data=[], loss_fn="eagle3")
            if is_step:
                under_way.append(await draft.submit("optim_step", adam_params={}))
            if random.random() < 0.5:
                await asyncio.sleep(random.choice([0, 0.01, 0.05]))
                await stack.aclose()
                server = draft.server = await stack.enter_async_context(running_server(config, dispatch))
            answers = [await server.result(each["request_id"]) for each in under_way]
            assert ["error" in each for each in answers[:-1]] == [False] * len(answers[:-1])
            assert not answers or ("error" in answers[-1]) == (is_step and not ends_well)
            if is_step:
                left -= waiting if ends_well else Counter()
                waiting.clear()
            assert await held(server) == 2 * len(+waiting)
            assert _uses_left(server) == sorted(2 * [left[number] for number in +left])
            if random.random() < 0.4:
                await server.services.runs.settle(0)


def _uses_left(server: Server) -> list[int]:
    return sorted(reference.uses or 0 for _, reference in server.services.features._references())

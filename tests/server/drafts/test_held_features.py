"""Captured features that are held for an unfinished step across restarts of the server, with each use counted once.

The workers are real.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.workers.dispatch import WorkerDispatch

from ..operations.test_pinned_checkpoints import until
from ..real import Run, Server, running_server
from .test_drafts import create_draft
from .test_features import (
    LOSS,
    capture,
    feature_files,
    feature_stats,
    hold,
    refusal_of,
    some_data,
    train_draft,
)
from .test_features import config as config

pytestmark = pytest.mark.anyio

USED_UP = "and none is left"


async def learn(draft: Run, data: list[dict[str, Any]]) -> None:
    assert "error" not in await train_draft(draft, data)


async def step(draft: Run) -> None:
    assert "error" not in await draft.optim_step()


async def num_held(server: Server) -> int:
    return (await feature_stats(server))["num_held"]


@pytest.mark.parametrize("between", ["nothing", "a restart", "snapshots", "snapshots and more"])
async def test_uses_before_a_restart_are_taken_by_the_next_step(
    config: ServerConfig, dispatch: WorkerDispatch, between: str
) -> None:
    """This holds even if the journal no longer has the operations that use the features."""
    async with running_server(config, dispatch) as server:
        draft = await create_draft(server)
        data, later = [await capture(draft, some_data(seed), uses=2) for seed in (1, 2)]
        for batch in (data, later):
            await learn(draft, batch)
        await step(draft)
        await learn(draft, data)
        if between.startswith("snapshots"):
            await server.services.runs.snapshot_old_runs(0)
            assert len(list((config.store.state_dir / "snapshots").glob("*/[0-9]*"))) == 2
        if between != "snapshots":
            await learn(draft, later)
    if between == "a restart":
        async with running_server(config, dispatch):
            pass
    async with running_server(config, dispatch) as server:
        draft.server = server
        assert await num_held(server) == (3 if between == "snapshots" else 6)
        await step(draft)
        assert (await feature_stats(server))["num_sequences"] == (3 if between == "snapshots" else 0)
        assert USED_UP in await refusal_of(draft, data)


async def test_uses_before_a_restart_are_unavailable_to_other_runs(
    config: ServerConfig, dispatch: WorkerDispatch
) -> None:
    async with running_server(config, dispatch) as server:
        draft, other = [await create_draft(server) for _ in range(2)]
        data = await capture(draft, some_data(1), uses=1)
        await learn(draft, data)
    async with running_server(config, dispatch) as server:
        draft.server = other.server = server
        assert "it has 1 uses left, 1 of them for operations before this one" in await refusal_of(other, data)
        await step(draft)
        assert USED_UP in await refusal_of(draft, data)


@pytest.mark.parametrize("restarts", [False, True])
async def test_failures_before_a_vocabulary_map_take_no_uses(
    config: ServerConfig, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """build_vocab_map starts a new gradient window."""

    async def broken(request: object, *rest: object) -> None:
        raise RuntimeError("out of order")

    async with AsyncExitStack() as servers:
        server = await servers.enter_async_context(running_server(config, dispatch))
        draft = await create_draft(server, draft_vocab_size=64)
        failing, later = [await capture(draft, some_data(seed), uses=1) for seed in (1, 2)]
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "forward_backward", broken)
            assert "internal error" in (await train_draft(draft, failing))["error"]
        assert await num_held(server) == 3
        assert "error" not in await draft.do("build_vocab_map", counts={"5": 1})
        assert await num_held(server) == 0
        await learn(draft, later)
        if restarts:
            await servers.aclose()
            draft.server = await servers.enter_async_context(running_server(config, dispatch))
        await step(draft)
        await learn(draft, failing)
        assert USED_UP in await refusal_of(draft, later)


@pytest.mark.parametrize("meanwhile", ["released", "expired"])
async def test_features_of_an_unfinished_step_are_held_after_a_restart(
    config: ServerConfig, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Each run that needs the features holds them."""
    async with running_server(config, dispatch) as server:
        draft, other = [await create_draft(server) for _ in range(2)]
        data = await capture(draft, some_data(1), ttl_seconds=None if meanwhile == "released" else 1)
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
        found = await feature_stats(server)
        assert (found["num_sequences"], found["num_held"], found["num_references"]) == (3, 3, 0)
        assert len(feature_files(server)) == 6
        await step(other)
        assert (await feature_stats(server))["num_sequences"] == 0 and feature_files(server) == []


@pytest.mark.parametrize("dies", ["before", "after"])
async def test_a_step_counts_once_if_the_server_dies_around_the_count(
    config: ServerConfig, dispatch: WorkerDispatch, dies: str
) -> None:
    """The server dies before the uses are taken, or after that is written but before the step is answered."""
    async with running_server(config, dispatch) as server:
        draft = await create_draft(server)
        data = await capture(draft, some_data(1), uses=2)
        await learn(draft, data)
        is_reached = _hang_at_stepped(server, dies)
        accepted = await draft.submit("optim_step", adam_params={})
        await is_reached.wait()
    async with running_server(config, dispatch) as server:
        draft.server = server
        await learn(draft, data)
        assert "error" not in await server.result(accepted["request_id"])
        assert (await feature_stats(server))["num_sequences"] == 3
        await step(draft)
        assert (await feature_stats(server))["num_sequences"] == 0
        assert USED_UP in await refusal_of(draft, data)


def _hang_at_stepped(server: Server, dies: str) -> asyncio.Event:
    """Makes the server hang in `features.stepped`. The returned event is set as soon as it does."""
    features, is_reached = server.services.context.features, asyncio.Event()
    stepped: Callable[..., Awaitable[None]] = features.release_holds_before

    async def stopping(*arguments: Any, **named: Any) -> None:
        if dies == "after":
            await stepped(*arguments, **named)
        is_reached.set()
        await asyncio.Event().wait()

    features.release_holds_before = stopping
    return is_reached


@pytest.mark.parametrize("fails", ["it broke", "it was not understood", "its batch is incomplete"])
@pytest.mark.parametrize("has_snapshot", [False, True])
async def test_a_failed_step_takes_no_uses_and_releases_what_it_clears(
    config: ServerConfig, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch, fails: str, has_snapshot: bool
) -> None:
    """This holds with and without a restart. The next step takes the uses that were not cleared."""
    async with running_server(config, dispatch) as server:
        draft = await create_draft(server)
        data = await capture(draft, some_data(1), uses=1)
        await learn(draft, data)
        clears = fails == "its batch is incomplete"
        if clears:
            await draft.submit("forward_backward", status=400, data=[], loss_fn="eagle3")
        with monkeypatch.context() as patch:
            if fails == "it broke":
                patch.setattr(dispatch, "optim_step", _breaks)
            fields: dict[str, Any] = {"optimizer_params": {"type": "muon"}} if "understood" in fails else {}
            assert "error" in await draft.do("optim_step", **fields)
        if has_snapshot:
            await server.services.runs.snapshot_old_runs(0)
        assert await num_held(server) == (0 if clears else 3)
    async with running_server(config, dispatch) as server:
        draft.server = server
        assert await num_held(server) == (0 if clears else 3)
        if clears:
            await learn(draft, data)
        await step(draft)
        assert (await feature_stats(server))["num_sequences"] == 0


async def _breaks(*_: object) -> object:
    raise OperationError("out of memory", "server")


async def test_features_of_a_forward_are_not_held_after_a_restart(
    config: ServerConfig, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_server(config, dispatch) as server:
        draft = await create_draft(server)
        data = await capture(draft, some_data(1))
        assert "error" not in await train_draft(draft, data, "forward")
        await hold(draft, monkeypatch)
        accepted = await draft.submit("forward", data=data, loss_fn="eagle3", loss_fn_config={"ttt_length": 3})
        assert await num_held(server) == 3
    monkeypatch.undo()
    async with running_server(config, dispatch) as server:
        assert "error" not in await server.result(accepted["request_id"])
        await until(lambda: server.services.context.features.stock().num_held == 0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
async def test_uses_are_counted_across_random_interruptions(
    config: ServerConfig, dispatch: WorkerDispatch, seed: int
) -> None:
    """Interleaves passes, steps that succeed or clear, snapshots, and restarts while any of them is under way."""
    random = Random(seed)
    left, waiting, batches = Counter(dict.fromkeys(range(3), 12)), Counter[int](), {}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_server(config, dispatch))
        draft = await create_draft(server)
        for number in left:
            batches[number] = await capture(draft, some_data(number, 2), uses=12)
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
            assert await num_held(server) == 2 * len(+waiting)
            assert _uses_left(config) == sorted(2 * [left[number] for number in +left])
            if random.random() < 0.4:
                await server.services.runs.snapshot_old_runs(0)


def _uses_left(config: ServerConfig) -> list[int]:
    files = (config.store.state_dir / "features").glob("*/*.json")
    return sorted(reference["uses"] for path in files for reference in json.loads(path.read_text()))

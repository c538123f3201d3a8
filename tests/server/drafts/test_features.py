"""Captured features: ownership, expiry, quotas, features held for unfinished steps, and recovery from crashes.

The workers are real: stored features must give the results that running the target gives.
"""

import asyncio
import errno
import json
import resource
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from trainhouse.schemas.training import AdamParams, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.drafts.feature_cache import FeatureFiles
from trainhouse.server.drafts.feature_store import FeatureStore
from trainhouse.server.drafts.rows import FEATURES
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.calls import RunInfo

from ..operations.test_pinned_checkpoints import until
from ..real import ALICE, BOB, MODEL, Run, Server, running_server, server_config, started_dispatch
from .test_drafts import EAGLE, create_draft, create_policy, kill_worker, saved_policy

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

LOSS = {"loss_fn": "eagle3", "loss_fn_config": {"ttt_length": 3}}
NO_CAPTURE = {"capture_for": None}
LENGTH = 12
SEQUENCE_BYTES = 3 * 64 * 4 * LENGTH + 1024
"""Charged for the features of a sequence: two layers and the last hidden states of 64 floats, and the file's header."""
BATCH_BYTES = 3 * SEQUENCE_BYTES
ADDRESS = "1" * 32


@pytest.fixture
def config(tiny_models: dict[str, Path], tmp_path: Path) -> ServerConfig:
    return config_of(tiny_models, tmp_path)


def config_of(tiny_models: dict[str, Path], state_dir: Path, **options: Any) -> ServerConfig:
    return server_config(tiny_models["qwen3"], state_dir, **({"feature_wait_seconds": 0.2} | options))


class Clock:
    """Seconds since 1970, of which `passed` have passed since a moment ago."""

    passed = 0.0

    def __call__(self) -> float:
        return time.time() + self.passed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Returns the clock by which features expire."""
    clock = Clock()
    monkeypatch.setitem(FEATURES, "files", partial(FeatureStore, clock=clock))
    return clock


@pytest.fixture
async def server(config: ServerConfig, dispatch: WorkerDispatch, clock: Clock) -> AsyncIterator[Server]:
    async with running_server(config, dispatch) as running:
        yield running


Serving = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serving(dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path) -> Serving:
    """Returns what runs a server with these options; run again, it is the same server after a restart."""
    return lambda **options: running_server(config_of(tiny_models, tmp_path, **options), dispatch)


def some_data(seed: int, number: int = 3) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [{"model_input": random.integers(3, 500, LENGTH).tolist()} for _ in range(number)]


async def capture(run: Run, data: Sequence[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """Captures the data and returns it with references."""
    answer = await run.do("capture", data=data, **fields)
    assert "error" not in answer, answer
    return [datum | {"feature_ref": ref} for datum, ref in zip(data, answer["feature_refs"], strict=True)]


def repeatable(output: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the metrics that depend on time, or on whether the target ran."""
    if "metrics" not in output:
        return output
    learned = {name: value for name, value in output["metrics"].items() if name not in ("mfu:mean", "model_flops:sum")}
    return output | {"metrics": learned}


async def train_draft(run: Run, data: Sequence[dict[str, Any]], verb: str = "forward_backward") -> Any:
    """Returns the repeatable part of the result."""
    return repeatable(await run.do(verb, data=data, **LOSS))


async def refusal_of(run: Run, data: Sequence[dict[str, Any]], verb: str = "forward_backward") -> str:
    failed = await train_draft(run, data, verb)
    assert failed["category"] == "user", failed
    return failed["error"]


async def hold(run: Run, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Makes the run's later operations wait behind a save of its weights, which waits for the event."""
    dispatch, may_save = run.server.services.dispatch, asyncio.Event()
    save_run = dispatch.save_run

    async def saving(*arguments: Any, **options: Any) -> None:
        await may_save.wait()
        await save_run(*arguments, **options)

    monkeypatch.setattr(dispatch, "save_run", saving)
    await run.submit("save_weights", path="held")
    return may_save


async def feature_stats(server: Server) -> dict[str, int]:
    return (await server.clients[ALICE].get("workers")).json()["features"]


async def limits_of(server: Server) -> dict[str, Any]:
    return (await server.clients[ALICE].get("limits")).json()


def feature_files(server: Server) -> list[str]:
    return sorted(path.name for path in (server.services.config.store.state_dir / "features").glob("*/*"))


# Training


async def test_stored_features_train_like_running_the_target(server: Server) -> None:
    target = await saved_policy(server, 3)
    online, offline = [await create_draft(server, target_path=target) for _ in range(2)]
    batches = [some_data(seed) for seed in (1, 2)]
    referring = [await capture(offline, batch) for batch in batches]
    assert (await feature_stats(server))["num_sequences"] == 6
    for epoch in range(2):
        for batch, with_refs in zip(batches, referring, strict=True):
            assert await train_draft(online, batch, "forward") == await train_draft(offline, with_refs, "forward")
            assert await train_draft(online, batch) == await train_draft(offline, with_refs), epoch
            assert await online.optim_step() == await offline.optim_step()


async def test_chunked_and_plain_tokens_share_features(server: Server) -> None:
    draft = await create_draft(server)
    (datum,) = some_data(1, 1)
    chunked = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": datum["model_input"]}]}}
    (one,), (other,) = await capture(draft, [datum]), await capture(draft, [chunked])
    address = [each["feature_ref"].split("-")[1] for each in (one, other)]
    assert address[0] == address[1] and one["feature_ref"] != other["feature_ref"]
    assert (await feature_stats(server))["num_sequences"] == 1 and (await feature_stats(server))["num_references"] == 2


# References


async def test_references_belong_to_one_tenant(server: Server) -> None:
    draft, of_bob = await create_draft(server), await create_draft(server, BOB)
    data = await capture(draft, some_data(1))
    assert "cannot be used: it does not exist, or is not yours" in await refusal_of(of_bob, data)
    await capture(of_bob, some_data(1))
    assert "cannot be used: it does not exist, or is not yours" in await refusal_of(of_bob, data), (
        "although bob captured the same data"
    )
    assert (await feature_stats(server))["num_sequences"] == 6, "each tenant has its own"
    other = await create_draft(server)
    assert "error" not in await train_draft(other, data), "any draft of the tenant with the same target"


@pytest.mark.parametrize("ref", ["", "nothing", "features-zz-1", f"features-{'0' * 32}-1", "features-../../x-1", 7])
async def test_invalid_references_are_refused_by_name(server: Server, ref: Any) -> None:
    draft, data = await create_draft(server), some_data(1)
    data[1]["feature_ref"] = ref
    if ref == 7:
        await draft.submit("forward_backward", status=400, data=data, **LOSS)
    elif ref:
        assert f"feature_ref {ref} cannot be used: it does not exist" in await refusal_of(draft, data)
    else:
        assert "error" not in await train_draft(draft, data)


async def test_features_of_another_target_are_refused_until_it_is_set_again(server: Server) -> None:
    draft = await create_draft(server)
    data = await capture(draft, some_data(1))
    await draft.do("set_target", path=await saved_policy(server, 3))
    reason = await refusal_of(draft, data)
    assert "datum 0: its feature_ref names features captured from target" in reason and "capture them again" in reason
    assert "error" not in await train_draft(draft, await capture(draft, some_data(1)))
    await draft.do("set_target", path=None)
    assert "error" not in await train_draft(draft, data)
    other = await create_draft(server, capture_layers=[0])
    assert "but the draft reads 0 with hidden_state" in await refusal_of(other, data)


async def test_only_drafts_can_capture_and_use_references(server: Server) -> None:
    draft, policy = await create_draft(server), await create_policy(server, 3)
    (datum,) = await capture(draft, some_data(1, 1))
    assert (await policy.do("capture", data=some_data(1)))["error"] == (
        "a policy has no target: capture is only for draft models"
    )
    inputs = {"loss_fn_inputs": {"target_tokens": datum["model_input"], "weights": [1.0] * LENGTH}}
    failed = await policy.do("forward", data=[datum | inputs], loss_fn="cross_entropy")
    assert failed["error"] == "feature_ref is only for draft models, and this is a policy: leave it out"
    assert "unknown loss_fn 'capture'" in (await draft.do("forward", data=[datum], loss_fn="capture"))["error"]
    bad = await draft.do("capture", data=[{"model_input": [600]}])
    assert "outside the vocabulary" in bad["error"]
    await draft.submit("capture", status=400, data=[], seq_id=99)


async def test_references_expire(server: Server, clock: Clock) -> None:
    draft = await create_draft(server)
    soon, later = await capture(draft, some_data(1), ttl_seconds=60), await capture(draft, some_data(2))
    clock.passed = 61
    assert "cannot be used: it has expired; capture it again" in await refusal_of(draft, soon)
    assert (await feature_stats(server))["num_sequences"] == 6
    await server.services.context.features.expire()
    assert (await feature_stats(server))["num_sequences"] == 3 and len(feature_files(server)) == 6
    assert "cannot be used: it has expired; capture it again" in await refusal_of(draft, soon), (
        "the server remembers why"
    )
    assert "error" not in await train_draft(draft, later)
    answer = await draft.do("capture", data=some_data(1))
    expires_at = clock() + server.services.config.features.feature_ttl_seconds
    assert answer["expires_at"] == pytest.approx(expires_at, abs=30)


async def test_ttl_is_limited_by_the_server_except_for_accepted_captures(serving: Serving) -> None:
    async with serving() as server:
        draft = await create_draft(server)
        for seconds in (10**12, 86400.5, 1e300):
            refusal = await draft.submit("capture", status=400, data=some_data(1), ttl_seconds=seconds)
            assert refusal["detail"] == (
                f"ttl_seconds is {seconds:.15g}, more than the 86400 for which features are kept here: request at most"
                f" that, leave it out, or start the server with --feature-ttl-seconds {seconds:.15g}"
            )
        answer = await draft.do("capture", data=some_data(1), ttl_seconds=86400)
        assert "error" not in answer, "refused captures do not block later ones"
    async with serving(feature_ttl_seconds=60.0) as server:
        draft.server = server
        again = {"data": some_data(1), "ttl_seconds": 86400, "seq_id": 4}
        submitted = await draft.submit("capture", **again)
        assert (await server.result(submitted["request_id"]))["feature_refs"] == answer["feature_refs"]
        refusal = await draft.submit("capture", status=400, **(again | {"seq_id": 5}))
        assert "more than the 60 for" in refusal["detail"]


async def test_features_are_freed_after_the_step_of_their_last_use(server: Server) -> None:
    draft = await create_draft(server)
    data = await capture(draft, some_data(1), uses=2)
    before = await feature_stats(server)
    assert before["num_bytes"] > 0
    for step in range(2):
        assert "error" not in await train_draft(draft, data, "forward"), "a forward does not count as a use"
        assert "error" not in await train_draft(draft, data)
        assert (await feature_stats(server))["num_bytes"] == before["num_bytes"], step
        assert "error" not in await draft.optim_step()
    assert await feature_stats(server) == dict.fromkeys(before, 0) and feature_files(server) == []
    assert "it was captured for a limited number of uses, and none is left" in await refusal_of(draft, data)


async def test_uses_of_earlier_operations_are_unavailable_to_later_ones(server: Server) -> None:
    draft = await create_draft(server)
    data = await capture(draft, some_data(1), uses=2)
    requests = [await draft.submit("forward_backward", data=data, **LOSS) for _ in range(3)]
    answers = [await server.result(each["request_id"]) for each in requests]
    assert [("error" in answer) for answer in answers] == [False, False, True]
    assert "it has 2 uses left, 2 of them for operations before this one" in answers[2]["error"]
    failed = await draft.optim_step()
    assert "error" in failed, "its batch is incomplete"
    assert "error" not in await train_draft(draft, data), "only a successful step takes a use"


async def test_a_datum_captured_twice_in_a_batch_has_two_uses(server: Server) -> None:
    draft = await create_draft(server)
    (datum,) = some_data(1, 1)
    data = await capture(draft, [datum, datum], uses=1)
    assert data[0] == data[1] and (await feature_stats(server))["num_references"] == 1
    assert "error" not in await train_draft(draft, data) and "error" not in await draft.optim_step()
    assert (await feature_stats(server))["num_bytes"] == 0


async def test_features_of_an_unfinished_step_are_held_despite_release_and_expiry(server: Server, clock: Clock) -> None:
    draft = await create_draft(server)
    one, other, third = [await capture(draft, some_data(seed)) for seed in (1, 2, 3)]
    for data in (one, other):
        assert "error" not in await train_draft(draft, data)
    body = {"model_id": draft.model_id, "feature_refs": [each["feature_ref"] for each in one]}
    assert (await server.post("release_features", body))["num_released"] == 3
    assert (await server.post("release_features", body))["num_released"] == 0
    clock.passed = 1e6
    await server.services.context.features.expire()
    found = await feature_stats(server)
    assert (found["num_sequences"], found["num_held"], found["num_references"]) == (6, 6, 0)
    assert "cannot be used: it was released; capture it again" in await refusal_of(draft, one)
    assert "cannot be used: it has expired" in await refusal_of(draft, third)
    assert (await feature_stats(server))["num_held"] == 6, "held until the next step, which clears the window"
    await draft.optim_step()
    assert (await feature_stats(server))["num_bytes"] == 0 and feature_files(server) == []


async def test_released_features_stay_while_another_reference_exists(server: Server) -> None:
    one, other = [await create_draft(server) for _ in range(2)]
    data, again = [await capture(draft, some_data(1)) for draft in (one, other)]
    assert (await feature_stats(server))["num_sequences"] == 3
    released = await server.post("release_features", {"model_id": one.model_id})
    assert released == {"num_released": 3, "type": "release_features"}
    assert (await feature_stats(server))["num_sequences"] == 3
    assert "it was released" in await refusal_of(other, data) and "error" not in await train_draft(other, again)
    await server.post(f"sessions/{other.session_id}/finish", {"reason": {"type": "success"}}, status=204)
    await until(lambda: not feature_files(server))
    assert (await feature_stats(server))["num_bytes"] == 0, "references end with their run"


@pytest.mark.parametrize("meanwhile", ["released", "expired", "used up"])
async def test_features_found_by_a_capture_are_kept_until_it_is_answered(
    server: Server, clock: Clock, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Features that no other reference needs are deleted after the answer, unless they were captured again."""
    draft, other = [await create_draft(server) for _ in range(2)]
    data = await capture(draft, some_data(1, 5), uses=1)
    forward_backward, deleted = server.services.dispatch.forward_backward, []

    async def ending(request: ForwardBackwardRequest, *rest: Any) -> ForwardBackwardOutput:
        output = await forward_backward(request, *rest)
        if request.loss_fn != "capture":
            return output
        before = feature_files(server)
        if meanwhile == "released":
            await server.post("release_features", {"model_id": draft.model_id})
        elif meanwhile == "expired":
            clock.passed = 1e6
            await server.services.context.features.expire()
        else:
            assert "error" not in await train_draft(draft, data) and "error" not in await draft.optim_step()
        deleted.append(set(before) - set(feature_files(server)))
        assert "cannot be used" in await refusal_of(draft, data)
        return output

    monkeypatch.setattr(server.services.dispatch, "forward_backward", ending)
    again = await capture(other, some_data(1, 5)[:3])
    assert deleted == [set()], "in one pass"
    assert (await feature_stats(server))["num_sequences"] == 3 and len(feature_files(server)) == 6
    assert "error" not in await train_draft(other, again)


# Room


async def test_room_released_during_a_capture_is_freed_after_it(
    dispatch: WorkerDispatch, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_backward, may_end = dispatch.forward_backward, asyncio.Event()

    async def held_up(request: ForwardBackwardRequest, *rest: Any) -> ForwardBackwardOutput:
        output = await forward_backward(request, *rest)
        await may_end.wait()
        return output

    options = {"tenant_feature_bytes": 2 * BATCH_BYTES + 100, "feature_wait_seconds": 30}
    async with serving(**options) as server:
        draft, other = [await create_draft(server) for _ in range(2)]
        await capture(draft, some_data(1))
        monkeypatch.setattr(dispatch, "forward_backward", held_up)
        under_way = await other.submit("capture", data=some_data(2))
        waiting = asyncio.create_task(draft.submit("capture", data=some_data(3)))
        stock = server.services.context.features.stock
        await until(lambda: len(feature_files(server)) == 6 + 3 and stock().num_waiting == 1)
        await server.post("release_features", {"model_id": draft.model_id})
        assert len(feature_files(server)) == 6 + 3 and not waiting.done()
        may_end.set()
        for each in (under_way, await waiting):
            assert "error" not in await server.result(each["request_id"])
        assert (await feature_stats(server))["num_sequences"] == 6


@pytest.fixture
async def tight_server(serving: Serving) -> AsyncIterator[Server]:
    """A server with room for one batch of each tenant."""
    options = {"tenant_feature_bytes": BATCH_BYTES + 100, "feature_wait_seconds": 0.3}
    async with serving(**options) as running:
        yield running


async def test_a_capture_beyond_the_limit_is_refused(tight_server: Server) -> None:
    draft = await create_draft(tight_server)
    refused = await draft.submit("capture", status=413, data=some_data(1, 4))
    assert f"more than the limit of {BATCH_BYTES + 100} (the server's --tenant-feature-bytes)" in refused["detail"]
    assert await capture(draft, some_data(1)), "it counts as done"


async def test_a_capture_that_finds_no_room_in_time_is_throttled(tight_server: Server) -> None:
    draft = await create_draft(tight_server)
    data = await capture(draft, some_data(1))
    body = {"model_id": draft.model_id, "data": some_data(2)}
    answer = await tight_server.clients[ALICE].post("capture", json=body)
    assert answer.status_code == 429 and float(answer.headers["Retry-After"]) > 0
    assert "captured features of yours have" in answer.json()["detail"]
    assert (await feature_stats(tight_server))["num_put_off"] == 1
    repeated = await draft.submit("capture", data=some_data(1), seq_id=1)
    refs = [datum["feature_ref"] for datum in data]
    assert (await tight_server.result(repeated["request_id"]))["feature_refs"] == refs, "its room is already reserved"


async def test_a_capture_waits_for_room_that_is_released(tight_server: Server) -> None:
    draft = await create_draft(tight_server)
    data = await capture(draft, some_data(1))
    waiting = asyncio.create_task(draft.submit("capture", data=some_data(2)))
    await until(lambda: tight_server.services.context.features.stock().num_waiting == 1)
    await tight_server.post("release_features", {"model_id": draft.model_id})
    assert "error" not in await tight_server.result((await waiting)["request_id"])
    assert "it was released" in await refusal_of(draft, data)


async def test_limits_show_the_bytes_of_a_tenant_and_of_all(tight_server: Server) -> None:
    for key in (ALICE, BOB):
        await capture(await create_draft(tight_server, key), some_data(2))
    limits = await limits_of(tight_server)
    assert limits["feature_bytes"]["limit"] == BATCH_BYTES + 100
    assert 0 < limits["feature_bytes"]["used"] <= BATCH_BYTES
    assert limits["server_feature_bytes"]["used"] == 2 * limits["feature_bytes"]["used"]


async def test_all_tenants_together_have_a_limit(serving: Serving) -> None:
    async with serving(feature_bytes=BATCH_BYTES) as server:
        draft, of_bob = await create_draft(server), await create_draft(server, BOB)
        await capture(draft, some_data(1))
        throttled = await of_bob.submit("capture", status=429, data=some_data(1))
        assert (
            "captured features of all tenants leave no room" in throttled["detail"]
            and "--feature-bytes" in throttled["detail"]
        )


async def test_a_capture_waits_for_the_creation_of_its_draft(
    dispatch: WorkerDispatch, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_create, create_run = asyncio.Event(), dispatch.create_run

    async def creating(*arguments: Any) -> RunInfo:
        await may_create.wait()
        return await create_run(*arguments)

    monkeypatch.setattr(dispatch, "create_run", creating)
    options = {"tenant_feature_bytes": BATCH_BYTES + 100, "feature_wait_seconds": 2}
    async with serving(**options) as server:
        session_id = await server.create_session()
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "model_role": "draft", "draft": EAGLE}
        draft = Run(server, (await server.post("create_model", body))["request_id"].rpartition(":")[0], session_id)
        throttled = await draft.submit("capture", status=429, data=some_data(1), seq_id=1)
        assert (
            throttled["detail"]
            == f"draft {draft.model_id} is not created yet: retry when its create_model has finished"
        )
        waits, wait = asyncio.Event(), server.services.futures.long_polls.wait

        async def waiting(*arguments: Any) -> bool:
            waits.set()
            return await wait(*arguments)

        monkeypatch.setattr(server.services.futures.long_polls, "wait", waiting)
        too_many = asyncio.create_task(draft.submit("capture", status=413, data=some_data(1, 4), seq_id=1))
        await waits.wait()
        may_create.set()
        assert "more than the limit" in (await too_many)["detail"]
        capturing = await draft.submit("capture", data=some_data(1), seq_id=2)
        assert "error" not in await server.result(capturing["request_id"])


async def test_accepted_captures_keep_their_room_after_a_restart(
    config: ServerConfig, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_server(config, dispatch) as server:
        draft, policy = await create_draft(server), await create_policy(server, 3)
        for run in (draft, policy):
            await hold(run, monkeypatch)
        of_pass: dict[str, Any] = {"loss_fn": "cross_entropy", "capture_for": draft.model_id}
        accepted = [
            await draft.submit("capture", data=some_data(1)),
            await policy.submit("forward", data=with_targets(some_data(2)), **of_pass),
        ]
    async with running_server(config, dispatch) as server:
        limits = await limits_of(server)
        assert limits["feature_bytes"]["used"] == limits["server_feature_bytes"]["used"] == 2 * BATCH_BYTES
    monkeypatch.undo()
    async with running_server(config, dispatch) as server:
        for each in accepted:
            assert "error" not in await server.result(each["request_id"])
        await until(lambda: not server.services.runs.is_busy)
        limits = await limits_of(server)
        assert limits["feature_bytes"]["used"] == (await feature_stats(server))["num_bytes"] < 2 * BATCH_BYTES


async def test_a_policys_pass_waits_for_room_and_then_runs_without_capturing(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"tenant_feature_bytes": BATCH_BYTES + 100, "feature_wait_seconds": 1}
    async with serving(**options) as server:
        policy, twin = [await create_policy(server, 3) for _ in range(2)]
        draft = await create_draft(server)
        asked: dict[str, Any] = {"loss_fn": "cross_entropy", "capture_for": draft.model_id}
        for seed, number, why in ((1, 3, ""), (2, 3, "captured features of yours have"), (3, 4, "more than the limit")):
            data = with_targets(some_data(seed, number))
            output = await policy.do("forward_backward", data=data, **asked)
            refs, wanted = (
                output.pop("feature_refs"),
                await twin.do("forward_backward", data=data, **asked | NO_CAPTURE),
            )
            assert repeatable(output) == repeatable(wanted) and [ref is None for ref in refs] == [bool(why)] * number
            assert why in caplog.text
        assert await policy.optim_step() == await twin.optim_step(), "none of them counts as refused"
        assert f"run {policy.model_id} captures nothing for {draft.model_id}: " in caplog.text
        waiting = asyncio.create_task(policy.do("forward", data=with_targets(some_data(2)), **asked))
        await until(lambda: server.services.context.features.stock().num_waiting == 1)
        await server.post("release_features", {"model_id": draft.model_id})
        assert None not in (await waiting)["feature_refs"], "room was freed in time"


async def test_a_pass_accepted_without_room_captures_nothing_after_a_restart(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The released features would leave room by then."""
    options = {"tenant_feature_bytes": BATCH_BYTES + 100}
    async with serving(**options) as server:
        policy, draft = await create_policy(server, 3), await create_draft(server)
        await capture(draft, some_data(1))
        await hold(policy, monkeypatch)
        asked: dict[str, Any] = {"loss_fn": "cross_entropy", "capture_for": draft.model_id}
        accepted = await policy.submit("forward_backward", data=with_targets(some_data(2)), **asked)
        await server.post("release_features", {"model_id": draft.model_id})
    monkeypatch.undo()
    async with serving(**options) as server:
        assert (await server.result(accepted["request_id"]))["feature_refs"] == [None] * 3
        assert (await feature_stats(server))["num_references"] == 0 and feature_files(server) == []
        policy.server = server
        output = await policy.do("forward_backward", data=with_targets(some_data(2)), **asked)
        assert None not in output["feature_refs"], "the next one has room"


async def test_a_capture_waits_for_the_step_that_frees_room(serving: Serving) -> None:
    """Each batch is captured for one use, with room for a single batch."""
    options = {"tenant_feature_bytes": BATCH_BYTES + 100, "feature_wait_seconds": 30}
    async with serving(**options) as server:
        draft = await create_draft(server)
        for seed in range(4):
            data = await capture(draft, some_data(seed), uses=1)
            learning = await draft.submit("forward_backward", data=data, **LOSS)
            stepping = await draft.submit("optim_step", adam_params=AdamParams().model_dump())
            for each in (learning, stepping):
                assert "error" not in await server.result(each["request_id"])
        assert (await feature_stats(server))["num_bytes"] == 0


async def test_capture_tokens_count_towards_the_rate_limit(serving: Serving) -> None:
    async with serving(tenant_tokens_per_minute=1000) as server:
        draft = await create_draft(server)
        await capture(draft, some_data(1))
        used = (await limits_of(server))["tokens_per_minute"]["used"]
        assert 0 < used <= 3 * LENGTH, "usage decays with time"


# Crashes


@pytest.mark.parametrize("dies", ["worker", "server"])
async def test_references_survive_crashes_of_workers_and_servers(
    tiny_models: dict[str, Path], tmp_path: Path, dies: str
) -> None:
    """Operations repeated after the crash give the same results, even with features that were deleted since."""
    config = config_of(tiny_models, tmp_path)
    async with started_dispatch(config) as dispatch:
        async with running_server(config, dispatch) as server:
            target = await saved_policy(server, 3)
            draft, unharmed = [await create_draft(server, target_path=target) for _ in range(2)]
            kept, used_up = await capture(draft, some_data(1)), await capture(draft, some_data(2), uses=1)
            for run, batches in ((draft, (kept, used_up)), (unharmed, (some_data(1), some_data(2)))):
                for batch in batches:
                    assert "error" not in await train_draft(run, batch)
                assert "error" not in await run.optim_step()
                assert "error" not in await train_draft(run, batches[0])
            assert (await feature_stats(server))["num_sequences"] == 3
            wanted = [await unharmed.optim_step(), await train_draft(unharmed, some_data(4), "forward")]
            if dies == "worker":
                await kill_worker(server)
                assert [await draft.optim_step(), await train_draft(draft, some_data(4), "forward")] == wanted
        if dies == "server":
            for snapshots in (tmp_path / "snapshots").glob("*/*"):
                (snapshots / "manifest.json").unlink()
        async with running_server(config, dispatch) as server:
            draft.server = server
            if dies == "server":
                assert [await draft.optim_step(), await train_draft(draft, some_data(4), "forward")] == wanted
            assert (await feature_stats(server))["num_sequences"] == 3
            assert "error" not in await train_draft(draft, kept, "forward")
            failed = await refusal_of(draft, used_up, "forward")
            assert "cannot be used: it " in failed


async def test_accepted_operations_run_after_a_restart_without_their_features(
    config: ServerConfig, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_server(config, dispatch) as server:
        draft, unharmed = [await create_draft(server) for _ in range(2)]
        data = await capture(draft, some_data(1))
        wanted = await train_draft(unharmed, some_data(1))
        await hold(draft, monkeypatch)
        accepted = await draft.submit("forward_backward", data=data, **LOSS)
    monkeypatch.undo()
    for path in (config.store.state_dir / "features").glob("*/*"):
        path.unlink()
    async with running_server(config, dispatch) as server:
        assert repeatable(await server.result(accepted["request_id"])) == wanted


async def test_references_written_by_earlier_versions_are_read(config: ServerConfig, tmp_path: Path) -> None:
    directory = tmp_path / "features" / "tml-alice%2Fa"
    directory.mkdir(parents=True)
    (directory / f"{ADDRESS}.safetensors").write_bytes(b"features")
    fields = {"run_id": "s:train:0", "expires_at": 2e9, "taken": {"s:train:1": 7}}
    named = [f"features-{ADDRESS}-{number}" for number in (1, 2)]
    written = [{"name": name, "uses": uses} | fields for name, uses in zip(named, (2, None), strict=True)]
    (directory / f"{ADDRESS}.json").write_text(json.dumps(written))
    features = FeatureStore(tmp_path / "features", config)
    await features.open()
    assert features.space.limits("tml-alice/a")["feature_bytes"].used == len("features")
    assert (features.stock().num_sequences, features.stock().num_references) == (1, 2)
    await features.sweep({"s:train:0"})
    assert json.loads((directory / f"{ADDRESS}.json").read_text()) == written, "nothing is rewritten"
    await features.sweep(set())
    assert not list(directory.iterdir())


async def test_files_without_an_answered_capture_are_swept(config: ServerConfig, dispatch: WorkerDispatch) -> None:
    async with running_server(config, dispatch) as server:
        draft = await create_draft(server)
        data = await capture(draft, some_data(1))
        (directory,) = (config.store.state_dir / "features").iterdir()
        (directory / f"{ADDRESS}.safetensors").write_bytes(b"a capture that a death ended")
        (directory / ".staging-1").write_bytes(b"a write that a death ended")
        of_another = directory.parent / "another-tenant"
        of_another.mkdir()
        (of_another / f"{'2' * 32}.safetensors").write_bytes(b"the first of a tenant")
        named = feature_files(server)
    async with running_server(config, dispatch) as server:
        assert len(feature_files(server)) == len(named) - 3 == 6
        draft.server = server
        assert "error" not in await train_draft(draft, data)


async def test_a_failed_forward_releases_its_features_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = await create_draft(server)
    data = await capture(draft, some_data(1))

    async def broken(request: ForwardBackwardRequest, *rest: Any) -> ForwardBackwardOutput:
        raise RuntimeError(f"{request.loss_fn} is broken")

    with monkeypatch.context() as patch:
        patch.setattr(server.services.dispatch, "forward_backward", broken)
        assert "internal error" in (await train_draft(draft, data, "forward"))["error"]
        assert (await feature_stats(server))["num_held"] == 0
        assert "internal error" in (await train_draft(draft, data))["error"]
        assert (await feature_stats(server))["num_held"] == 3, "held until the next step"
    assert "error" in await draft.optim_step()
    assert (await feature_stats(server))["num_held"] == 0


async def test_unknown_files_are_swept_after_failures_and_periodically(server: Server) -> None:
    """Steps and captures look at their own files only."""
    draft = await create_draft(server)
    await capture(draft, some_data(1))
    (directory,) = (server.services.config.store.state_dir / "features").iterdir()
    unknown = directory / f"{ADDRESS}.safetensors"
    unknown.write_bytes(b"")
    data = await capture(draft, some_data(2), uses=1)
    assert "error" not in await train_draft(draft, data) and "error" not in await draft.optim_step()
    await server.post("release_features", {"model_id": draft.model_id})
    assert feature_files(server) == [unknown.name]
    assert "error" in await draft.do("capture", data=[{"model_input": [600]}])
    assert feature_files(server) == []
    unknown.write_bytes(b"")
    await server.services.context.features.delete_unneeded()
    assert feature_files(server) == []


# One forward of the target for policy and draft


def with_targets(data: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds inputs for cross_entropy, all of which a draft can read as well."""
    inputs = ({"target_tokens": [*each["model_input"][1:], 5], "weights": [1.0] * LENGTH} for each in data)
    return [each | {"loss_fn_inputs": given} for each, given in zip(data, inputs, strict=True)]


async def test_policy_and_draft_train_on_one_forward(server: Server) -> None:
    """All features are freed after each step of the draft."""
    policy = await create_policy(server, 3)
    draft, online = [await create_draft(server) for _ in range(2)]
    data = with_targets(some_data(9))
    for step in range(3):
        path = (await policy.do("save_weights_for_sampler", path=f"step-{step}"))["path"]
        for each in (draft, online):
            await each.do("set_target", path=path)
        data = with_targets(some_data(step))
        output = await policy.do("forward_backward", data=data, loss_fn="cross_entropy", capture_for=draft.model_id)
        assert (
            output["loss_fn_outputs"][0].keys() == {"logprobs"} and (await feature_stats(server))["num_sequences"] == 3
        )
        assert "error" not in await policy.optim_step()
        referring = [one | {"feature_ref": ref} for one, ref in zip(data, output["feature_refs"], strict=True)]
        found, wanted = await train_draft(draft, referring), await train_draft(online, data)
        assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-4, abs=1e-4)
        for each in (draft, online):
            assert "error" not in await each.optim_step()
        assert (await feature_stats(server))["num_bytes"] == 0
    await draft.do("set_target", path=None)
    output = await policy.do("forward", data=data, loss_fn="cross_entropy", capture_for=draft.model_id)
    referring = [one | {"feature_ref": ref} for one, ref in zip(data, output["feature_refs"], strict=True)]
    assert "its feature_ref names features captured from target" in await refusal_of(draft, referring)
    released = await server.post("release_features", {"model_id": draft.model_id})
    assert released["num_released"] == 3, "the references belong to the draft"


def tenant_directory(server: Server) -> Path:
    (directory,) = (server.services.config.store.state_dir / "features").iterdir()
    return directory


@contextmanager
def full_disk(server: Server, file_bytes: int) -> Iterator[None]:
    """Limits the size of every file that the worker writes inside the block."""
    (pid,) = server.services.dispatch.pids(MODEL)
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (file_bytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


async def test_a_policy_trains_although_the_disk_is_full(server: Server) -> None:
    """Sequences that could not be stored have no reference, and the draft runs the target for them."""
    policy, twin = [await create_policy(server, 3) for _ in range(2)]
    path = (await policy.do("save_weights_for_sampler", path="a"))["path"]
    draft = await create_draft(server, target_path=path)
    data = with_targets(some_data(1, 9))
    shorter = [4, 7]
    for number in shorter:
        data[number] = with_targets([{"model_input": data[number]["model_input"][:3]}])[0]
        data[number]["loss_fn_inputs"]["weights"] = [1.0] * 3
    body = {"data": data, "loss_fn": "cross_entropy"}
    wanted = await twin.do("forward_backward", **body)
    with full_disk(server, SEQUENCE_BYTES // 2):
        output = await policy.do("forward_backward", **body, capture_for=draft.model_id)
        failed = await draft.do("capture", data=some_data(2))
    refs = output.pop("feature_refs")
    assert repeatable(output) == repeatable(wanted) and await policy.optim_step() == await twin.optim_step()
    assert [number for number, ref in enumerate(refs) if ref is not None] == shorter
    assert (await feature_stats(server))["num_sequences"] == 2 and not [
        name for name in feature_files(server) if "staging" in name
    ]
    referring = [one | {"feature_ref": ref} for one, ref in zip(data, refs, strict=True)]
    found, online = await train_draft(draft, referring), await train_draft(draft, data)
    assert found["metrics"] == pytest.approx(online["metrics"], rel=1e-4, abs=1e-4)
    assert failed["category"] == "server" and "are free there: make room on this disk" in failed["error"]
    assert failed["error"].startswith(f"features cannot be written to {tenant_directory(server)}")
    assert len(await capture(draft, some_data(2))) == 3, "the disk has room again"


def after_passes(server: Server, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Acts after each pass of the worker, before the server reads the answer."""
    forward_backward = server.services.dispatch.forward_backward

    async def acting(request: ForwardBackwardRequest, *rest: Any) -> ForwardBackwardOutput:
        output = await forward_backward(request, *rest)
        act()
        return output

    monkeypatch.setattr(server.services.dispatch, "forward_backward", acting)


@pytest.mark.parametrize("obstacle", ["no directory", "files disappear", "files cannot be checked"])
async def test_a_policy_trains_although_its_features_are_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    policy, draft = await create_policy(server, 3), await create_draft(server)
    await capture(draft, some_data(2))
    await server.post("release_features", {"model_id": draft.model_id})
    directory = tenant_directory(server)
    if obstacle == "no directory":
        directory.rmdir()
        directory.write_text("in the way")
    elif obstacle == "files disappear":
        after_passes(server, monkeypatch, lambda: shutil.rmtree(directory))
    else:
        stale = OSError(errno.ESTALE, "Stale file handle")
        monkeypatch.setattr(FeatureFiles, "exist", Mock(side_effect=stale))
    body = {"data": with_targets(some_data(1)), "loss_fn": "cross_entropy", "capture_for": draft.model_id}
    output = await policy.do("forward_backward", **body)
    assert output["feature_refs"] == [None] * 3 and "error" not in await policy.optim_step()
    if obstacle == "no directory":
        failed = await draft.do("capture", data=some_data(2))
        assert failed["category"] == "server" and f"'{directory}': make room on this disk" in failed["error"]
        return
    if obstacle == "files cannot be checked":
        assert f"run {policy.model_id} captures nothing for {draft.model_id}: [Errno" in caplog.text
    monkeypatch.undo()
    assert None not in (await policy.do("forward_backward", **body))["feature_refs"]


async def test_a_capture_whose_files_disappear_is_an_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = await create_draft(server)
    with monkeypatch.context() as patch:
        after_passes(server, patch, lambda: next(tenant_directory(server).iterdir()).unlink())
        failed = await draft.do("capture", data=some_data(1))
    assert failed["category"] == "server" and f"have disappeared from {tenant_directory(server)}" in failed["error"]
    assert (await feature_stats(server))["num_sequences"] == 0 and feature_files(server) == [], (
        "the other files are deleted as well"
    )
    assert len(await capture(draft, some_data(1))) == 3


async def test_capture_for_must_name_a_draft_of_the_tenant(server: Server) -> None:
    policy, other, draft = await create_policy(server, 3), await create_policy(server, 4), await create_draft(server)
    of_bob = await create_draft(server, BOB)
    body = {"data": with_targets(some_data(1)), "loss_fn": "cross_entropy"}
    failed = await policy.do("forward", **body, capture_for=other.model_id)
    assert failed["error"] == f"capture_for {other.model_id} is a policy: name a draft"
    critic = await create_policy(server, 3, model_role="critic")
    failed = await critic.do("forward", data=some_data(1), loss_fn="value_mse", capture_for=draft.model_id)
    assert failed["error"] == "capture_for is only for policies, and this is a critic: leave it out"
    for model_id in (of_bob.model_id, "none:train:0"):
        await policy.submit("forward_backward", status=404, **body, capture_for=model_id)
    tainted = await policy.optim_step()
    assert "was refused" in tainted["error"], "it counts as refused, and nothing waits for it"
    assert (await feature_stats(server))["num_bytes"] == 0


async def test_a_capturing_pass_cannot_use_references_itself(server: Server) -> None:
    policy, draft = await create_policy(server, 3), await create_draft(server)
    data = with_targets(await capture(draft, some_data(1)))
    for verb in ("forward", "forward_backward"):
        failed = await policy.do(verb, data=data, loss_fn="cross_entropy", capture_for=draft.model_id)
        assert failed["error"] == "feature_ref is only for draft models, and this is a policy: leave it out"
    assert (await feature_stats(server))["num_held"] == 0


@pytest.mark.parametrize("ends", ["before", "meanwhile", "within"])
async def test_nothing_is_captured_for_a_draft_that_has_ended(
    config: ServerConfig, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The draft ends before the request, before its turn, or within the pass."""
    async with running_server(config, dispatch) as server:
        policy, draft = await create_policy(server, 3), await create_draft(server)
        asked = {"data": with_targets(some_data(1)), "loss_fn": "cross_entropy", "capture_for": draft.model_id}

        async def end() -> None:
            await server.post(f"sessions/{draft.session_id}/finish", {"reason": {"type": "success"}}, status=204)
            await until(lambda: not server.services.runs._ending)

        if ends == "before":
            await end()
            refusal = await policy.submit("forward", status=410, **asked)
            assert f"run {draft.model_id} is not live: it was unloaded, its session has ended" in refusal["detail"]
            return
        if ends == "meanwhile":
            await hold(policy, monkeypatch)
        else:
            forward_backward = dispatch.forward_backward

            async def ending(request: ForwardBackwardRequest, *rest: Any) -> ForwardBackwardOutput:
                output = await forward_backward(request, *rest)
                await end()
                return output

            monkeypatch.setattr(dispatch, "forward_backward", ending)
        accepted = await policy.submit("forward", **asked)
        if ends == "meanwhile":
            await end()
        else:
            await server.result(accepted["request_id"])
    monkeypatch.undo()
    async with running_server(config, dispatch) as server:
        answered = await server.result(accepted["request_id"])
        if ends == "within":
            assert answered["feature_refs"] == [None] * 3, "the pass of the policy was already done"
        else:
            assert answered["error"] == (
                f"draft {draft.model_id}, named by capture_for, has ended with its session: create one, and name its "
                "model_id"
            )
        assert (await feature_stats(server))["num_references"] == 0 and feature_files(server) == []


@contextmanager
def unanswered(server: Server, request_id: str) -> Iterator[None]:
    """Drops the result of one operation inside the block, as if the server died before it was written."""
    futures, resolve = server.services.futures, server.services.futures.resolve
    futures.resolve = lambda future, *rest: None if future.request_id == request_id else resolve(future, *rest)
    yield
    futures.resolve = resolve


async def test_a_repeated_pass_does_not_capture_again(config: ServerConfig, dispatch: WorkerDispatch) -> None:
    """The pass is repeated after a restart because an earlier one was not answered."""
    asked = {"data": with_targets(some_data(1)), "loss_fn": "cross_entropy"}
    async with running_server(config, dispatch) as server:
        policy, draft = await create_policy(server, 3), await create_draft(server)
        with unanswered(server, first := f"{policy.model_id}:1"):
            await policy.submit("forward_backward", **asked)
            output = await policy.do("forward_backward", **asked, capture_for=draft.model_id)
        await server.post("release_features", {"model_id": draft.model_id, "feature_refs": output["feature_refs"]})
    async with running_server(config, dispatch) as server:
        policy.server = server
        assert "error" not in await server.result(first)
        assert (await policy.optim_step())["metrics"]["window_tokens:sum"] == 2 * 3 * LENGTH
        assert (await feature_stats(server))["num_references"] == 0 and feature_files(server) == []


async def test_a_pass_whose_draft_ended_fails_again_after_a_restart(
    config: ServerConfig, dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer stays the same, and no step includes the gradients."""
    asked = {"data": with_targets(some_data(1)), "loss_fn": "cross_entropy"}
    async with running_server(config, dispatch) as server:
        policy, draft = await create_policy(server, 3), await create_draft(server)
        may_save = await hold(policy, monkeypatch)
        with unanswered(server, first := f"{policy.model_id}:2"):
            await policy.submit("forward_backward", **asked)
            second = await policy.submit("forward_backward", **asked, capture_for=draft.model_id)
            await server.post(f"sessions/{draft.session_id}/finish", {"reason": {"type": "success"}}, status=204)
            await until(lambda: not server.services.runs._ending)
            may_save.set()
            failed = await server.result(second["request_id"])
        assert f"draft {draft.model_id}, named by capture_for, has ended" in failed["error"]
    async with running_server(config, dispatch) as server:
        policy.server = server
        assert "error" not in await server.result(first)
        assert await server.result(second["request_id"]) == failed
        assert "forward_backward with seq_id 3 failed" in (await policy.optim_step())["error"]
        assert "error" not in await policy.do("forward_backward", **asked)
        assert (await policy.optim_step())["metrics"]["window_tokens:sum"] == 3 * LENGTH


def test_features_whose_references_are_nested_too_deeply_are_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "a.json").write_text("[" * 1_000_000)
    assert FeatureFiles(tmp_path).read() == []

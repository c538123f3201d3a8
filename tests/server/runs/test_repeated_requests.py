"""Sequence numbers that clients give to models and samplers.

The same request sent again, as clients do after a lost answer, returns the same model or sampler. A different request
with that number is refused.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from trainhouse.schemas.errors import RequestError
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.journal.journal import Journal
from trainhouse.server.store.database.schema import runs
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.worker_config import ServedModel

from ..api import needs_drafts
from ..noting import with_noting_worker
from ..real import ALICE, MODEL, Server, running_server, server_config, started_dispatch

pytestmark = pytest.mark.anyio

OTHER = "tiny/other"
EAGLE = {"algorithm": "eagle3", "seed": 5}
LORA = {"lora_config": {"rank": 4}, "user_metadata": {"a": "b", "c": 1}}
DRAFT = {"model_role": "draft", "draft": EAGLE}


def config_of(tiny_models: dict[str, Path], state_dir: Path) -> ServerConfig:
    config = server_config(tiny_models["qwen3"], state_dir)
    return config.with_options(base_models=(*config.models.base_models, ServedModel(OTHER, str(tiny_models["qwen3"]))))


@pytest.fixture(scope="module")
async def dispatch(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[WorkerDispatch]:
    async with started_dispatch(
        config_of(tiny_models, tmp_path_factory.mktemp("unused")), with_noting_worker
    ) as dispatch:
        yield dispatch


class Restarting:
    """A server that can be restarted."""

    def __init__(self, config: ServerConfig, dispatch: WorkerDispatch) -> None:
        self._config, self._dispatch, self._stack = config, dispatch, AsyncExitStack()

    async def start(self) -> Server:
        await self.stop()
        return await self._stack.enter_async_context(running_server(self._config, self._dispatch))

    async def stop(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def restarting(
    tiny_models: dict[str, Path], tmp_path: Path, dispatch: WorkerDispatch
) -> AsyncIterator[Restarting]:
    restarting = Restarting(config_of(tiny_models, tmp_path / "state"), dispatch)
    yield restarting
    await restarting.stop()


async def create_model(server: Server, body: dict[str, Any], route: str = "create_model") -> str:
    return (await server.result((await server.post(route, body))["request_id"]))["model_id"]


@pytest.mark.parametrize(
    ("asked", "other"),
    [
        (LORA, {"lora_config": {"rank": 8}}),
        (LORA, {"lora_config": {"rank": 4, "seed": 1}}),
        (LORA, {"user_metadata": {"a": "b"}}),
        (LORA, {"base_model": OTHER}),
        (LORA, {"model_role": "critic"}),
        ({"training": "full"}, {"seed": 1}),
        pytest.param(DRAFT, {"draft": EAGLE | {"num_layers": 1}}, marks=needs_drafts),
        pytest.param(DRAFT, {"target_path": "PATH"}, marks=needs_drafts),
    ],
)
async def test_a_model_seq_id_belongs_to_one_request(
    restarting: Restarting, asked: dict[str, Any], other: dict[str, Any]
) -> None:
    server = await restarting.start()
    session_id = await server.create_session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL} | asked
    if "target_path" in other:
        policy = {
            "model_id": await create_model(
                server, body | LORA | {"model_role": "policy", "draft": None, "model_seq_id": 9}
            )
        }
        saved = await server.post("save_weights_for_sampler", policy | {"path": "a"})
        other = {"target_path": (await server.result(saved["request_id"]))["path"]}
    model_id = await create_model(server, body)
    for _ in range(2):
        reordered = dict(reversed([*body.items(), ("type", "create_model"), ("target_path", None)]))
        assert await create_model(server, reordered) == model_id
        refused = await server.post("create_model", body | other, status=400)
        assert refused["detail"] == (
            f"model_seq_id 0 of session {session_id} was a create_model, this is another create_model with different "
            "content: is another process creating models in this session? Nothing was created: create a session in "
            "each process, or give a new model the next number"
        )
        server = await restarting.start()
    assert await create_model(server, body | other | {"model_seq_id": 1}) == f"{session_id}:train:1"


async def test_a_model_seq_id_of_a_load_belongs_to_one_request(restarting: Restarting) -> None:
    server = await restarting.start()
    session_id = await server.create_session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL} | LORA
    model_id = await create_model(server, body)
    paths = []
    for name in ("a", "b"):
        saved = await server.post("save_weights", {"model_id": model_id, "path": name})
        paths.append((await server.result(saved["request_id"]))["path"])
    load = {"session_id": session_id, "model_seq_id": 1, "path": paths[0], "optimizer": True}
    loaded = await create_model(server, load, "load_weights")
    for _ in range(2):
        assert await create_model(server, load, "load_weights") == loaded
        for other, kinds in (
            ({"path": paths[1]}, "load_weights, this is another load_weights with different content"),
            ({"optimizer": False}, "load_weights, this is another load_weights with different content"),
            ({"model_seq_id": 0}, "create_model, this is a load_weights"),
        ):
            refused = await server.post("load_weights", load | other, status=400)
            assert f" was a {kinds}: is another process creating models" in refused["detail"]
        refused = await server.post("create_model", body | {"model_seq_id": 1}, status=400)
        assert " was a load_weights, this is a create_model: is another process" in refused["detail"]
        server = await restarting.start()


async def set_asked(server: Server, model_id: str, asked: str | None) -> None:
    changed = update(runs).where(runs.c.run_id == model_id).values(asked=asked)
    await server.services.store.write(lambda connection: connection.execute(changed))


async def test_models_of_earlier_versions_are_compared_as_far_as_they_are_known(restarting: Restarting) -> None:
    """These stored a hash of the request without its kind and, before that, nothing."""
    server = await restarting.start()
    body = {"session_id": await server.create_session(), "model_seq_id": 0, "base_model": MODEL} | LORA
    model_id = await create_model(server, body)
    other = body | {"lora_config": {"rank": 8}}
    hashed = {"kind": "create_model", "session_id": body["session_id"], "model_seq_id": 0, "base_model": MODEL} | LORA
    asked = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()
    await set_asked(server, model_id, asked)
    server = await restarting.start()
    assert await create_model(server, body) == model_id
    refused = await server.post("create_model", other, status=400)
    assert "was a different request, this is a create_model" in refused["detail"]
    await set_asked(server, model_id, None)
    server = await restarting.start()
    assert await create_model(server, other) == model_id


async def test_defaults_of_a_new_model_may_be_left_out_or_filled_in(restarting: Restarting) -> None:
    server = await restarting.start()
    numbers = {"session_id": await server.create_session(), "model_seq_id": 0}
    body = numbers | {"base_model": MODEL, "lora_config": {"rank": 4}}
    empty = {"user_metadata": {}, "optimizer_config": {"type": "adamw"}, "model_role": "policy", "target_path": None}
    lora = {"rank": 4.0, "seed": None, "train_mlp": True, "train_attn": True, "train_unembed": True}
    model_id = await create_model(server, body)
    for again in ({"user_metadata": None}, empty, {"lora_config": lora}, empty | {"lora_config": lora}):
        assert await create_model(server, body | again) == model_id
    saved = await server.post("save_weights", {"model_id": model_id, "path": "a"})
    load = numbers | {"path": (await server.result(saved["request_id"]))["path"], "model_seq_id": 1}
    loaded = await create_model(server, load, "load_weights")
    for again in (
        {"optimizer": False, "user_metadata": {}, "optimizer_config": {"type": "adamw"}},
        {"optimizer_config": None, "model_role": None, "weights_access_token": None, "base_model": None},
    ):
        assert await create_model(server, load | again, "load_weights") == loaded


@needs_drafts
async def test_a_sampler_seq_id_belongs_to_one_request(restarting: Restarting) -> None:
    server = await restarting.start()
    session_id = await server.create_session()
    model = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL}
    policy = {"model_id": await create_model(server, model | LORA)}
    draft = {"model_id": await create_model(server, model | DRAFT | {"model_seq_id": 1})}
    paths = []
    for each in (policy, draft):
        saved = await server.post("save_weights_for_sampler", each | {"path": "a"})
        paths.append((await server.result(saved["request_id"]))["path"])
    saved = await server.post("save_weights_for_sampler", policy | {"sampling_session_seq_id": 2})
    assert (await server.result(saved["request_id"]))["sampling_session_id"] == f"{session_id}:sample:2"
    session = {"session_id": session_id, "sampling_session_seq_id": 0}
    of_base, of_path, drafted = {"base_model": MODEL}, {"model_path": paths[0]}, {"draft_path": paths[1]}
    kinds = {0: of_base, 1: of_path, 3: of_base | drafted, 4: of_path | drafted}
    for _ in range(2):
        for number, asked in kinds.items():
            body = session | {"sampling_session_seq_id": number}
            sampler = {"sampling_session_id": f"{session_id}:sample:{number}", "type": "create_sampling_session"}
            assert await server.post("create_sampling_session", body | asked) == sampler
            assert await server.post("create_sampling_session", body | asked) == sampler
            for other in [{"base_model": OTHER}, *(each for each in kinds.values() if each != asked)]:
                refused = await server.post("create_sampling_session", body | other, status=400)
                assert f"sampling_session_seq_id {number} of session {session_id} was a sampler" in refused["detail"]
                assert "this is another sampler: is another process sampling" in refused["detail"]
        refused = await server.post(
            "create_sampling_session", session | {"sampling_session_seq_id": 2} | of_base, status=400
        )
        assert f"was a sampler with the weights that run {policy['model_id']} had" in refused["detail"]
        server = await restarting.start()


@pytest.mark.parametrize("route", ["create_model", "create_sampling_session"])
async def test_one_of_two_concurrent_requests_with_the_same_seq_id_is_refused(
    restarting: Restarting, route: str
) -> None:
    server = await restarting.start()
    numbers = {"session_id": await server.create_session(), "model_seq_id": 0, "sampling_session_seq_id": 0}
    number = {"create_model": "model_seq_id", "create_sampling_session": "sampling_session_seq_id"}[route]
    body = {name: numbers[name] for name in ("session_id", number)}
    posts = (server.clients[ALICE].post(route, json=body | {"base_model": model}) for model in (MODEL, OTHER))
    assert sorted(answer.status_code for answer in await asyncio.gather(*posts)) == [200, 400]


async def test_a_request_that_finds_its_run_stored_meanwhile_is_compared_with_it(
    restarting: Restarting, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await restarting.start()
    body = {"session_id": await server.create_session(), "model_seq_id": 0, "base_model": MODEL}
    asked, created = asyncio.Event(), asyncio.Event()
    find = server.services.store.runs.get

    async def find_late(run_id: str) -> object:
        asked.set()
        await created.wait()
        return await find(run_id)

    with monkeypatch.context() as patch:
        patch.setattr(server.services.store.runs, "get", find_late)
        late = asyncio.create_task(server.post("create_model", body | {"base_model": OTHER}, status=400))
        await asked.wait()
    assert await create_model(server, body)
    created.set()
    assert "model_seq_id 0" in (await late)["detail"]


async def test_a_seq_id_stays_free_if_its_request_was_not_accepted(
    restarting: Restarting, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await restarting.start()
    body = {"session_id": await server.create_session(), "model_seq_id": 0, "base_model": MODEL}

    def full(*_: object) -> "asyncio.Future[object]":
        place = asyncio.get_running_loop().create_future()
        place.set_exception(RequestError("the disk is full", 503))
        return place

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", full)
        both = [server.post("create_model", body | {"lora_config": {"rank": 4}}, status=503) for _ in range(2)]
        await asyncio.gather(*both)
    assert await create_model(server, body | {"lora_config": {"rank": 8}})

"""Models with all weights trained (full), next to LoRA: creation, recording, answers and recovery."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tinker import types
from trainhouse.schemas.models import ExpertFactors, FullConfig, LoraConfig, TrainingConfig
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.journal.journal import Header, Journal, read_journal
from trainhouse.workers.dispatch import WorkerDispatch

from ..noting import NO_ROOM, NO_ROOM_FOR_COPIES, TARGETS, with_noting_worker
from ..real import ALICE, BOB, MODEL, Run, Server, running_server, sample_body, server_config

pytestmark = pytest.mark.anyio


@pytest.fixture
def config(tiny_models: dict[str, Path], tmp_path: Path) -> ServerConfig:
    return server_config(tiny_models["qwen3"], tmp_path / "state", max_lora_rank=64)


@pytest.fixture(scope="module")
async def dispatch(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[WorkerDispatch]:
    config = server_config(tiny_models["qwen3"], tmp_path_factory.mktemp("unused"))
    dispatch = WorkerDispatch(with_noting_worker(config.dispatch_config()))
    await dispatch.start(lambda message: None)
    yield dispatch
    await dispatch.close()


@pytest.fixture
async def server(config: ServerConfig, dispatch: WorkerDispatch) -> AsyncIterator[Server]:
    async with running_server(config, dispatch) as running:
        yield running


async def create(server: Server, session_id: str | None = None, number: int = 0, **fields: Any) -> Run:
    session_id = session_id or await server.create_session()
    body = {"session_id": session_id, "model_seq_id": number, "base_model": MODEL} | fields
    created = await server.result((await server.post("create_model", body))["request_id"])
    return Run(server, created["model_id"], session_id)


async def recorded_config(server: Server, run: Run) -> TrainingConfig:
    record = await server.services.store.runs.get(run.model_id)
    assert record is not None
    return record.training


async def load(server: Server, path: str, **fields: Any) -> Run:
    """Creates a run from a checkpoint as SDKs do."""
    session_id = await server.create_session()
    request = types.LoadWeightsRequest(session_id=session_id, model_seq_id=0, path=path, optimizer=True)
    body = request.model_dump(exclude_none=True) | fields
    created = await server.result((await server.post("load_weights", body))["request_id"])
    return Run(server, created["model_id"], session_id)


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        ({}, FullConfig(seed=5)),
        ({"training": "full"}, FullConfig(seed=5)),
        ({"training": "full", "model_role": "critic"}, FullConfig(seed=5)),
        ({"training": "lora", "seed": None}, LoraConfig(expert_factors="shared")),
        (
            {"training": "lora", "lora_config": {"rank": 4, "seed": 5}, "seed": None},
            LoraConfig(rank=4, seed=5, expert_factors="shared"),
        ),
        ({"lora_config": {"rank": 4, "seed": 5}, "seed": None}, LoraConfig(rank=4, seed=5, expert_factors="shared")),
    ],
)
async def test_the_recorded_training_config_is_the_requested_one(
    server: Server, fields: dict, trained: TrainingConfig
) -> None:
    run = await create(server, **{"seed": 5, **fields})
    kept = await recorded_config(server, run)
    assert kept == (trained if trained.seed is not None else trained.model_copy(update={"seed": kept.seed}))
    assert kept.seed is not None


async def test_a_full_model_is_described_to_the_sdk_as_not_lora(server: Server) -> None:
    run, lora_run = await create(server), await create(server, lora_config={"rank": 4})
    described, other = [await server.post("get_info", {"model_id": each.model_id}) for each in (run, lora_run)]
    assert (described["lora_alpha"], described["target_modules"], other["target_modules"]) == (0, [], list(TARGETS))
    for answer, is_lora, rank in ((described, False, 0), (other, True, 4)):
        info = types.GetInfoResponse.model_validate(answer)
        assert (info.is_lora, info.lora_rank, info.model_name) == (is_lora, rank, MODEL)
    path = (await run.do("save_weights", path="a"))["path"]
    for each, is_lora, rank in ((run, False, None), (lora_run, True, 4)):
        response = await server.clients[ALICE].get(f"training_runs/{each.model_id}")
        listed = types.TrainingRun.model_validate(response.json())
        assert (listed.is_lora, listed.lora_rank) == (is_lora, rank)
    weights = types.WeightsInfoResponse.model_validate(await server.post("weights_info", {"tinker_path": path}))
    assert (weights.base_model, weights.is_lora, weights.lora_rank) == (MODEL, False, None)
    assert (weights.train_attn, weights.train_mlp, weights.train_unembed) == (None, None, None)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"training": "full", "lora_config": {"rank": 4}}, "training is 'full' and there is a lora_config: leave out"),
        ({"lora_config": {"rank": 4}, "seed": 3}, "seed 3 is only for full models: for LoRA set lora_config.seed"),
        ({"training": "lora", "seed": 3}, "seed 3 is only for full models"),
        ({"training": "some"}, "training is 'some'"),
        ({"training": "lora", "lora_config": {"rank": 65}}, "rank 65 exceeds max_lora_rank 64"),
    ],
)
async def test_contradictory_fields_are_refused_and_not_journaled(server: Server, fields: dict, reason: str) -> None:
    body = {"session_id": await server.create_session(), "model_seq_id": 0, "base_model": MODEL}
    assert reason in (await server.post("create_model", body | fields, status=400))["detail"]
    assert "error" not in await server.result((await server.post("create_model", body))["request_id"])


async def test_a_drawn_seed_is_journaled(server: Server) -> None:
    first, second = await create(server), await create(server)
    (segment,) = (server.services.config.store.state_dir / "journal").glob("*.segment")
    drawn = {entry.header.run_id: dict(entry.header.drawn) for entry in read_journal(segment)}
    seeds = [(await recorded_config(server, run)).seed for run in (first, second)]
    assert [drawn[run.model_id] for run in (first, second)] == [{"full_seed": seed} for seed in seeds]
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("fields", "drawn", "trained"),
    [
        # Without lora_config, an earlier version created LoRA and drew lora_seed.
        ({}, {"lora_seed": 5}, LoraConfig(seed=5)),
        ({"lora_config": {"rank": 4}}, {"lora_seed": 5}, LoraConfig(rank=4, seed=5)),
        ({"lora_config": {"rank": 4, "seed": 7}}, {}, LoraConfig(rank=4, seed=7)),
        ({"training": "lora"}, {"lora_seed": 5}, LoraConfig(seed=5)),
        ({}, {"full_seed": 5}, FullConfig(seed=5)),
        ({"training": "full", "seed": 7}, {}, FullConfig(seed=7)),
        ({"seed": 7}, {}, FullConfig(seed=7)),
    ],
)
async def test_the_next_server_creates_the_journaled_kind_of_model(
    config: ServerConfig, dispatch: WorkerDispatch, fields: dict, drawn: dict[str, int], trained: TrainingConfig
) -> None:
    async with running_server(config, dispatch) as former:
        run_id = f"{await former.create_session()}:train:0"
        tenant = await former.services.auth.authenticate(ALICE)
    body = {"session_id": run_id.partition(":")[0], "model_seq_id": 0, "base_model": MODEL} | fields
    journal = Journal(config.store.state_dir / "journal", 1 << 20)
    header = Header("create_model", tenant.id, run_id, 0, f"{run_id}:0", drawn=drawn)
    await journal.append(header, json.dumps(body).encode())
    await journal.close()
    async with running_server(config, dispatch) as latter:
        assert (await latter.result(f"{run_id}:0"))["model_id"] == run_id
        run = Run(latter, run_id, body["session_id"])
        assert await recorded_config(latter, run) == trained
        info = await latter.post("get_info", {"model_id": run_id})
        assert info["is_lora"] == isinstance(trained, LoraConfig)


@pytest.mark.parametrize(
    ("requested", "journaled", "trained"),
    [(None, "shared", "shared"), ("each", None, "each"), ("shared", None, "shared"), (None, None, None)],
)
async def test_expert_factors_are_those_that_the_accepting_server_chose(
    config: ServerConfig,
    dispatch: WorkerDispatch,
    requested: ExpertFactors | None,
    journaled: ExpertFactors | None,
    trained: ExpertFactors | None,
) -> None:
    """Earlier versions, which journaled none, gave each expert its own."""
    lora = {"rank": 4, "seed": 7} | ({"expert_factors": requested} if requested else {})
    async with running_server(config, dispatch) as former:
        if (requested, journaled) != (None, None):
            now = await create(former, lora_config=lora)
            assert await recorded_config(former, now) == LoraConfig(rank=4, seed=7, expert_factors=trained)
            (segment,) = (config.store.state_dir / "journal").glob("*.segment")
            (entry,) = (each for each in read_journal(segment) if each.header.run_id == now.model_id)
            assert entry.header.expert_factors == journaled
        run_id = f"{await former.create_session()}:train:0"
        tenant = await former.services.auth.authenticate(ALICE)
    body = {"session_id": run_id.partition(":")[0], "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
    journal = Journal(config.store.state_dir / "journal", 1 << 20)
    header = Header("create_model", tenant.id, run_id, 0, f"{run_id}:0", expert_factors=journaled)
    await journal.append(header, json.dumps(body).encode())
    await journal.close()
    async with running_server(config, dispatch) as latter:
        await latter.result(f"{run_id}:0")
        run = Run(latter, run_id, body["session_id"])
        assert await recorded_config(latter, run) == LoraConfig(rank=4, seed=7, expert_factors=trained)


async def test_a_model_from_a_checkpoint_has_the_kind_of_the_checkpoint(server: Server) -> None:
    for made, is_lora in ((await create(server), False), (await create(server, lora_config={"rank": 4}), True)):
        path = (await made.do("save_weights", path="a"))["path"]
        copy = (await server.post("copy_weights", {"source_path": path}))["tinker_path"]
        for source in (path, copy):
            loaded = await load(server, source)
            assert (await server.post("get_info", {"model_id": loaded.model_id}))["is_lora"] == is_lora
            assert await recorded_config(server, loaded) == await recorded_config(server, made)
            assert "error" not in await loaded.do("load_weights", path=path, optimizer=True)


async def test_a_checkpoint_of_the_other_kind_cannot_be_loaded(server: Server) -> None:
    full, lora = await create(server), await create(server, lora_config={"rank": 4})
    of_full, of_lora = [(await run.do("save_weights", path="a"))["path"] for run in (full, lora)]
    for run, path, reason in (
        (lora, of_full, "is of a full model, and run {} is a LoRA adapter: create a model from it"),
        (full, of_lora, "is of a LoRA adapter, and run {} is a full model: create a model from it"),
    ):
        failed = await run.do("load_weights", path=path)
        assert failed["category"] == "user" and reason.format(run.model_id) in failed["error"]
        own = of_lora if path == of_full else of_full
        assert "error" not in await run.do("load_weights", path=own)


async def test_a_full_model_can_be_sampled_by_path_and_live(server: Server) -> None:
    run = await create(server)
    saved = (await run.do("save_weights_for_sampler", path="a"))["path"]
    live = (await run.do("save_weights_for_sampler"))["sampling_session_id"]
    for fields in ({"sampling_session_id": live}, {"sampling_session_id": None, "seq_id": None, "model_path": saved}):
        sampled = await server.post("asample", sample_body(live) | fields)
        assert "error" not in await server.result(sampled["request_id"])


async def test_full_models_are_limited_and_only_live_ones_count(config: ServerConfig, dispatch: WorkerDispatch) -> None:
    async with running_server(config.with_options(max_full_models=2), dispatch) as server:
        lora_run = await create(server, lora_config={"rank": 4})
        failed = {"session_id": lora_run.session_id, "model_seq_id": 1, "base_model": MODEL, "seed": NO_ROOM}
        answer = await server.result((await server.post("create_model", failed))["request_id"])
        assert answer["error"] == "there is no room for it"
        first, second = await create(server), await create(server)
        path = (await first.do("save_weights", path="a"))["path"]
        third = {"session_id": await server.create_session(BOB), "model_seq_id": 0}
        for verb, fields in (("create_model", {"base_model": MODEL}), ("load_weights", {"path": path})):
            key = BOB if verb == "create_model" else ALICE
            own = third if key == BOB else third | {"session_id": second.session_id, "model_seq_id": 7}
            refused = await server.post(verb, own | fields, key, status=400)
            assert "max_full_models 2" in refused["detail"] and "--max-full-models 3" in refused["detail"]
        again = {"session_id": second.session_id, "model_seq_id": 0, "base_model": MODEL}
        assert (await server.post("create_model", again))["request_id"] == f"{second.model_id}:0", "it already exists"
        await create(server, lora_config={"rank": 4})
        await server.post(f"sessions/{first.session_id}/finish", {"reason": {"type": "success"}}, status=204)
        created = await server.post("create_model", third | {"base_model": MODEL}, BOB)
        assert "error" not in await server.result(created["request_id"], BOB)


async def test_weights_of_a_sampler_that_failed_are_deleted_from_disk(server: Server) -> None:
    kept, refused = await create(server), await create(server, seed=NO_ROOM_FOR_COPIES)
    await kept.do("save_weights_for_sampler")
    failed = await refused.do("save_weights_for_sampler")
    assert failed["error"] == "there is no room for a copy"
    (left,) = (server.services.config.store.state_dir / "ephemeral").iterdir()
    assert kept.session_id in left.name


async def test_max_full_models_0_allows_only_lora(config: ServerConfig, dispatch: WorkerDispatch) -> None:
    async with running_server(config.with_options(max_full_models=0), dispatch) as server:
        body = {"session_id": await server.create_session(), "model_seq_id": 0, "base_model": MODEL}
        assert "max_full_models 0" in (await server.post("create_model", body, status=400))["detail"]
        await create(server, training="lora")


async def test_a_failed_load_leaves_nothing_in_the_workers(server: Server, dispatch: WorkerDispatch) -> None:
    made = await create(server)
    path = (await made.do("save_weights_for_sampler", path="a"))["path"]  # without optimizer
    body = {"session_id": made.session_id, "model_seq_id": 1, "path": path, "optimizer": True}
    answer = await server.result((await server.post("load_weights", body))["request_id"])
    assert "has no optimizer state" in answer["error"]
    runs = (await dispatch.memory())[MODEL]
    assert made.model_id in runs and f"{made.session_id}:train:1" not in runs

"""Listings and descriptions over HTTP, validated by the SDK's own types."""

import dataclasses
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from tinker import types
from trainhouse.server.store import SamplerRecord

from ..api import ALICE, BOB, MODEL, Api, running_api

pytestmark = pytest.mark.anyio


async def list_runs(api: Api, key: str = ALICE, **params: object) -> types.TrainingRunsResponse:
    response = await (await api.client(key)).get("/api/v1/training_runs", params={k: str(v) for k, v in params.items()})
    return types.TrainingRunsResponse.model_validate(response.json())


async def test_runs_are_paged_with_the_last_used_first(api: Api) -> None:
    runs = [await api.run(at=float(number)) for number in range(1, 6)]
    page = await list_runs(api, limit=2, offset=1)
    assert [run.training_run_id for run in page.training_runs] == [runs[3].run_id, runs[2].run_id]
    assert (page.cursor.offset, page.cursor.limit, page.cursor.total_count) == (1, 2, 5)


async def test_a_page_offset_beyond_64_bits_is_refused(api: Api) -> None:
    refused = await (await api.client()).get("/api/v1/training_runs", params={"offset": 2**63})
    assert refused.status_code == 400 and "offset is" in refused.json()["detail"]


async def test_a_run_shows_its_owner_adapter_and_last_checkpoints(api: Api) -> None:
    run = await api.run()
    for name in ("one", "two"):
        await api.save(run, name)
        await api.save(run, name, kind="sampler_weights")
        api.clock.now += 1
    response = await (await api.client()).get(f"/api/v1/training_runs/{run.run_id}")
    described = types.TrainingRun.model_validate(response.json())
    assert (described.base_model, described.is_lora, described.lora_rank, described.corrupted) == (
        MODEL,
        True,
        8,
        False,
    )
    assert described.model_owner == (await api.tenant()).name
    assert described.last_request_time.timestamp() == run.last_request_at
    assert described.user_metadata == {"purpose": "test"}
    assert described.last_checkpoint is not None and described.last_checkpoint.checkpoint_id == "weights/two"
    assert described.last_sampler_checkpoint is not None
    assert described.last_sampler_checkpoint.checkpoint_id == "sampler_weights/two"


async def test_checkpoint_types_match_the_sdk(api: Api) -> None:
    run = await api.run()
    for kind in ("weights", "sampler_weights", "external_weights"):
        await api.save(run, kind=kind)
    response = await (await api.client()).get("/api/v1/checkpoints")
    answer = types.CheckpointsListResponse.model_validate(response.json())
    for checkpoint in answer.checkpoints:
        parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(checkpoint.tinker_path)
        assert (parsed.checkpoint_type, parsed.checkpoint_id) == (checkpoint.checkpoint_type, checkpoint.checkpoint_id)
        assert parsed.training_run_id == run.run_id
    assert {one.checkpoint_type for one in answer.checkpoints} == {"training", "sampler", "external"}


async def test_checkpoints_of_all_runs_are_paged_with_the_newest_first(api: Api) -> None:
    for _ in range(3):
        await api.save(await api.run())
        api.clock.now += 1
    response = await (await api.client()).get("/api/v1/checkpoints", params={"limit": 2})
    answer = types.CheckpointsListResponse.model_validate(response.json())
    times = [checkpoint.time for checkpoint in answer.checkpoints]
    assert len(times) == 2 and times[0] > times[1]
    assert answer.cursor is not None and answer.cursor.total_count == 3


async def test_runs_of_other_tenants_are_not_found(api: Api) -> None:
    run = await api.run(ALICE)
    await api.save(run)
    for scope in ("owned", "accessible"):
        assert (await list_runs(api, BOB, access_scope=scope)).training_runs == []
        response = await (await api.client(BOB)).get(
            f"/api/v1/training_runs/{run.run_id}", params={"access_scope": scope}
        )
        assert response.status_code == 404
    assert (await (await api.client(BOB)).get("/api/v1/checkpoints")).json()["checkpoints"] == []


async def test_a_run_with_a_public_checkpoint_is_accessible_and_shows_only_that(api: Api) -> None:
    run = await api.run(ALICE)
    await api.save(run, "private")
    public = await api.save(run, "public")
    await api.save(run, "later")
    await api.services.checkpoints.set_public(public, True)
    assert (await list_runs(api, BOB, access_scope="owned")).training_runs == []
    (described,) = (await list_runs(api, BOB, access_scope="accessible")).training_runs
    assert described.last_checkpoint is not None and described.last_checkpoint.checkpoint_id == "weights/public"
    response = await (await api.client(BOB)).get(f"/api/v1/training_runs/{run.run_id}/checkpoints")
    assert [one["checkpoint_id"] for one in response.json()["checkpoints"]] == ["weights/public"]


async def test_a_published_checkpoint_hides_its_owner_metadata_and_activity(api: Api) -> None:
    run = await api.run(ALICE, at=1_700_000_500.0)
    owner = await api.client(ALICE)
    await owner.put(f"/api/v1/sessions/{run.session_id}/project", json={"project_id": "secret-project"})
    public = await api.save(run, "public")
    api.clock.now += 10
    await api.save(run, "private")
    await api.services.checkpoints.set_public(public, True)
    other = await api.client(BOB)
    one, params = f"/api/v1/training_runs/{run.run_id}", {"access_scope": "accessible"}
    answers = [
        (await other.get(one, params=params)).raise_for_status(),
        (await other.get(f"{one}/checkpoints")).raise_for_status(),
        (await other.get("/api/v1/training_runs", params=params)).raise_for_status(),
        (await other.post("/api/v1/weights_info", json={"tinker_path": public.tinker_path})).raise_for_status(),
        (await other.get(f"{one}/checkpoints/weights/public/external_weights_urls")).raise_for_status(),
    ]
    described = types.TrainingRun.model_validate(answers[0].json())
    assert (described.model_owner, described.user_metadata) == ("another tenant", None)
    assert described.last_request_time.timestamp() == public.created_at != run.last_request_at
    tenant = await api.tenant(ALICE)
    for answer in answers:
        assert tenant.name not in answer.text and "purpose" not in answer.text and "private" not in answer.text
    by_project = params | {"project_id": "secret-project"}
    assert (await other.get("/api/v1/training_runs", params=by_project)).json()["training_runs"] == []
    (own,) = (await owner.get("/api/v1/training_runs", params=by_project)).json()["training_runs"]
    assert (own["model_owner"], own["user_metadata"]) == (tenant.name, {"purpose": "test"}), "the owner sees them"
    assert (await other.get(f"/api/v1/sessions/{run.session_id}")).status_code == 404


async def test_a_session_with_a_public_checkpoint_is_accessible_and_shows_only_that_run(api: Api) -> None:
    client, other = await api.client(ALICE), await api.client(BOB)
    body = {"sdk_version": "0.38.0", "tags": ["secret"], "user_metadata": {"a": "secret"}, "display_name": "secret"}
    session_id = (await client.post("/api/v1/create_session", json=body)).json()["session_id"]
    first = dataclasses.replace(await api.run(ALICE), session_id=session_id)
    runs = [dataclasses.replace(first, run_id=f"{session_id}:train:{number}") for number in range(3)]
    for run in runs:
        await api.services.store.runs.insert(run)
    public = await api.save(runs[1], "public")
    await api.save(runs[2], "private")
    one = f"/api/v1/sessions/{session_id}"
    accessible, owned = {"access_scope": "accessible"}, {"access_scope": "owned"}

    async def seen(asking: httpx.AsyncClient, params: dict[str, str]) -> list[str]:
        answer = (await asking.get("/api/v1/sessions", params=params)).raise_for_status().json()
        return types.ListSessionsResponse.model_validate(answer).sessions

    for params in ({}, owned, accessible):
        assert (await other.get(one, params=params)).status_code == 404
        assert session_id not in await seen(other, params) and session_id in await seen(client, params)
    await api.services.checkpoints.set_public(public, True)
    for params in ({}, owned):
        assert (await other.get(one, params=params)).status_code == 404 and session_id not in await seen(other, params)
    own = await api.session(BOB)
    assert await seen(other, accessible) == [own, session_id], "the newest first"
    assert await seen(other, accessible | {"limit": "1", "offset": "1"}) == [session_id]
    described = await other.get(one, params=accessible)
    assert "secret" not in described.text
    shown = types.GetSessionResponse.model_validate(described.json())
    assert (shown.training_run_ids, shown.sampler_ids) == ([runs[1].run_id], [])
    for params in ({}, owned, accessible):
        mine = (await client.get(one, params=params)).json()
        assert sorted(mine["training_run_ids"]) == [run.run_id for run in runs]
        assert (mine["tags"], mine["display_name"], mine["user_metadata"]) == (["secret"], "secret", {"a": "secret"})
    api.clock.now += 1
    await api.services.checkpoints.set_ttl(public, 3600)
    api.clock.now += 3601
    assert (await other.get(one, params=accessible)).status_code == 404
    assert await seen(other, accessible) == [own]
    for path in (one, "/api/v1/sessions"):
        wrong = await client.get(path, params={"access_scope": "everything"})
        assert wrong.status_code == 400 and "access_scope" in wrong.json()["detail"]


async def test_a_session_lists_its_runs_and_samplers(api: Api) -> None:
    run = await api.run()
    tenant = await api.tenant()
    sampler = SamplerRecord(f"{run.session_id}:sample:0", run.session_id, tenant.id, MODEL, 1.0)
    await api.services.store.samplers.insert(sampler)
    client = await api.client()
    response = await client.get(f"/api/v1/sessions/{run.session_id}")
    session = types.GetSessionResponse.model_validate(response.json())
    assert (session.training_run_ids, session.sampler_ids) == ([run.run_id], [sampler.sampler_id])
    listed = types.ListSessionsResponse.model_validate((await client.get("/api/v1/sessions")).json())
    assert listed.sessions == [run.session_id]


async def test_metadata_values_are_shown_as_strings(api: Api) -> None:
    client = await api.client()
    body = {"sdk_version": "0.38.0", "user_metadata": {"n": 1, "s": "x"}, "display_name": "named"}
    session_id = (await client.post("/api/v1/create_session", json=body)).json()["session_id"]
    response = await client.get(f"/api/v1/sessions/{session_id}")
    session = types.GetSessionResponse.model_validate(response.json())
    assert (session.user_metadata, session.display_name) == ({"n": "1", "s": "x"}, "named")


async def test_a_restart_keeps_every_listing(tmp_path: Path) -> None:
    async def listings(api: Api) -> list[object]:
        client = await api.client()
        paths = (
            "training_runs",
            "checkpoints",
            "sessions",
            f"sessions/{run.session_id}",
            f"training_runs/{run.run_id}",
        )
        return [(await client.get(f"/api/v1/{path}")).json() for path in paths]

    async with running_api(tmp_path) as api:
        run = await api.run()
        await api.save(run)
        before = await listings(api)
    async with running_api(tmp_path) as api:
        assert await listings(api) == before


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (directory / name).write_text(f'{{"file": "{name}"}}')
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


async def test_tokenizer_files_can_be_fetched(tmp_path: Path, model_directory: Path) -> None:
    async with running_api(tmp_path / "state", str(model_directory)) as api:
        client = await api.client()
        files = (await client.get(f"/api/v1/models/{MODEL}/tokenizer")).json()["files"]
        assert set(files) == {"tokenizer.json", "tokenizer_config.json", "config.json"}
        for name, file_url in files.items():
            assert (await client.get(file_url)).json() == {"file": name}


async def test_the_directory_of_a_model_is_told_to_clients_on_the_servers_machine_alone(
    tmp_path: Path, model_directory: Path
) -> None:
    digest = sha256((model_directory / "config.json").read_bytes()).hexdigest()
    async with running_api(tmp_path / "state", str(model_directory)) as api:

        async def told(address: str = "127.0.0.1", **headers: str) -> tuple[str | None, str | None]:
            transport = httpx.ASGITransport(api.app, client=(address, 1234))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                answer = await client.get("/api/v1/get_server_capabilities", headers={"X-API-Key": ALICE, **headers})
            (model,) = answer.json()["supported_models"]
            return model.get("directory"), model.get("config_sha256")

        assert await told() == await told("::1") == (str(model_directory), digest)
        assert await told("192.0.2.1") == (None, None)
        for name in ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host"):
            assert await told(**{name: "192.0.2.1"}) == (None, None)
        # The files are read once, at the start.
        (model_directory / "config.json").write_text("{}")
        assert await told() == (str(model_directory), digest)
    async with running_api(tmp_path / "open", str(model_directory), host="0.0.0.0") as api:
        assert api.services.model_files == {}


@pytest.mark.parametrize("file", ["model.safetensors", "..%2Fmodel%2Ftokenizer.json", "vocab.json", "%2Fetc%2Fpasswd"])
async def test_only_tokenizer_files_can_be_fetched(tmp_path: Path, model_directory: Path, file: str) -> None:
    async with running_api(tmp_path / "state", str(model_directory)) as api:
        assert (await (await api.client()).get(f"/api/v1/models/{MODEL}/tokenizer/{file}")).status_code == 404


async def test_a_missing_tokenizer_is_refused_with_its_source(api: Api) -> None:
    response = await (await api.client()).get(f"/api/v1/models/{MODEL}/tokenizer")
    assert response.status_code == 404 and "tiny/source" in response.json()["detail"]
    response = await (await api.client()).get("/api/v1/models/other/tokenizer")
    assert response.status_code == 404 and MODEL in response.json()["detail"]


async def test_the_tokenizer_of_a_model_in_the_hub_cache_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--tiny--source" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    refs = tmp_path / "models--tiny--source" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    async with running_api(tmp_path / "state") as api:
        files = (await (await api.client()).get(f"/api/v1/models/{MODEL}/tokenizer")).json()["files"]
        assert list(files) == ["tokenizer.json"]
        assert (await (await api.client()).get(files["tokenizer.json"])).json() == {}

"""The models that OpenAI clients see are those that they can sample."""

import dataclasses
import time

import pytest
from trainhouse.server.openai import routes

from ..api import ALICE, BOB, MODEL, MODEL_INFO, Api

pytestmark = pytest.mark.anyio


async def test_training_checkpoints_do_not_hide_sampler_checkpoints(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_MAX_LISTED", 3)
    run = await api.run()
    for name in ("a", "b", "c", "d"):
        await api.save(run, name, "sampler_weights")
        api.clock.now += 1
    for number in range(7):
        api.clock.now += 1
        await api.save(run, f"step-{number}", "weights")
    listed = (await (await api.client()).get("/v1/models")).json()["data"]
    saved = [f"tinker://{run.run_id}/sampler_weights/{name}" for name in ("d", "c", "b")]
    assert [one["id"] for one in listed] == [MODEL, *saved]
    assert {one["owned_by"] for one in listed[1:]} == {(await api.tenant(ALICE)).name}


async def test_models_name_their_context_their_base_model_and_their_time(api: Api) -> None:
    """vLLM's server does so, for clients that size their prompts by max_model_len."""
    before = time.time()
    record = await api.save(await api.run(), "a", "sampler_weights")
    listed = (await (await api.client()).get("/v1/models")).json()["data"]
    base, saved = listed
    of_all = {"object": "model", "max_model_len": MODEL_INFO.max_context_length}
    assert base == of_all | {
        "id": MODEL,
        "root": MODEL,
        "parent": None,
        "owned_by": "trainhouse",
        "created": int(api.services.started_at),
    }
    assert before - 600 < base["created"] <= time.time()
    assert saved == of_all | {
        "id": record.tinker_path,
        "root": record.tinker_path,
        "parent": MODEL,
        "owned_by": (await api.tenant()).name,
        "created": int(record.created_at),
    }
    for one in listed:
        assert (await (await api.client()).get(f"/v1/models/{one['id']}")).json() == one


async def test_a_public_checkpoint_has_another_owner_for_its_readers(api: Api) -> None:
    record = await api.save(await api.run(), "a", "sampler_weights")
    await api.services.checkpoints.set_public(record, True)
    for key, owner in ((ALICE, (await api.tenant(ALICE)).name), (BOB, "another tenant")):
        shown = (await (await api.client(key)).get(f"/v1/models/{record.tinker_path}")).json()
        assert (shown["id"], shown["owned_by"]) == (record.tinker_path, owner)


async def test_a_checkpoint_of_an_unserved_base_model_is_neither_listed_nor_found(api: Api) -> None:
    run = dataclasses.replace(await api.run(), base_model="tiny/gone")
    record = await api.save(run, "a", "sampler_weights")
    assert [one["id"] for one in (await (await api.client()).get("/v1/models")).json()["data"]] == [MODEL]
    answer = await (await api.client()).get(f"/v1/models/{record.tinker_path}")
    assert answer.status_code == 404 and "tiny/gone" in answer.json()["error"]["message"]

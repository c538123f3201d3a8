"""Pages for operators: who sees them, and who makes and revokes keys."""

import re

import pytest
from trainhouse.server.tenants.auth import create_key, list_keys

from ..real import ALICE, Server, batch, sample_body
from .signed_in import form_token, signed_in

pytestmark = pytest.mark.anyio

KEYS = "/console/admin/keys"
NEW = {"name": "new team", "scopes": ["read"], "requests_per_minute": 7}


async def test_on_an_open_server_all_see_the_pages_and_no_one_makes_the_first_key(server: Server) -> None:
    run = await server.create_run()
    await run.train(batch(), 1)
    async with signed_in(server.app, ALICE) as client:
        capacity = (await client.get("/console/capacity")).text
        assert all(words in capacity for words in ("tiny/qwen3", "pass", "step", "Nothing waits."))
        assert run.session_id not in capacity, "operators see how much, not what"
        admin = (await client.get("/console/admin")).text
        assert "--tenant-runs" in admin and "keys create" in admin and 'id="new-key"' not in admin
        refused = await client.post(KEYS, json=NEW, headers=await form_token(client))
    assert refused.status_code == 400 and "everyone who reaches it" in refused.text
    assert not await list_keys(server.services.store)


async def test_queues_count_the_sampling_jobs_of_a_tenant(server: Server) -> None:
    run = await server.create_run()
    session = {"session_id": run.session_id, "sampling_session_seq_id": 0, "base_model": "tiny/qwen3"}
    sampler_id = (await server.post("create_sampling_session", session))["sampling_session_id"]
    params = {"max_tokens": 200, "seed": 1, "stop": []}
    sent = [await server.post("asample", sample_body(sampler_id, seq_id, sampling_params=params)) for seq_id in (0, 1)]
    async with signed_in(server.app, ALICE) as client:
        capacity = (await client.get("/console/capacity")).text
    for each in sent:
        await server.result(each["request_id"])
    [(name, waiting, tokens, jobs)] = re.findall(
        r'<tr><td>(.+?)</td><td class="id">tiny/qwen3</td>' + 3 * r'<td class="num">(\d+)</td>' + "</tr>", capacity
    )
    assert name.startswith("local-") and (waiting, tokens, jobs) == ("0", "0", "2")


async def test_keys_are_made_and_revoked_by_operators_with_scope_admin(server: Server) -> None:
    store = server.services.store
    for scopes in (("train", "sample", "read", "admin"), ("read", "operator")):
        key = await create_key(store, "<b>team</b>", scopes)
        async with signed_in(server.app, key) as client:
            for page in ("admin", "capacity"):
                assert (await client.get(f"/console/{page}")).status_code == (200 if "operator" in scopes else 403)
            token = await form_token(client)
            made = await client.post(KEYS, json=NEW, headers=token)
            revoked = await client.post(f"{KEYS}/1/revoke", headers=token)
            assert (made.status_code, revoked.status_code) == (403, 403) and "admin" in made.text + revoked.text
    assert len(await list_keys(store)) == 2
    administrator = await create_key(store, "ops", ("read", "admin", "operator"))
    async with signed_in(server.app, administrator) as client:
        token = await form_token(client)
        assert (await client.post(KEYS, json=NEW)).status_code == 403, "without the token of a page"
        for wrong in (
            {"name": "a,b"},
            {"scopes": []},
            {"scopes": ["root"]},
            {"requests_per_minute": 0},
            {"key": "tml-a"},
        ):
            assert (await client.post(KEYS, json=NEW | wrong, headers=token)).status_code == 400, wrong
        made = await client.post(KEYS, json=NEW, headers=token)
        key = made.json()["key"]
        assert made.headers["cache-control"] == "no-store" and (await server.services.auth.authenticate(key)).name
        newest = (await list_keys(store))[-1]
        assert (newest.name, newest.scopes, newest.requests_per_minute) == ("new team", ("read",), 7)
        page = (await client.get("/console/admin")).text
        assert "new team" in page and key not in page and "<b>team" not in page
        assert (await client.post(f"{KEYS}/{newest.key_id}/revoke", headers=token)).status_code == 204
        assert (await client.post(f"{KEYS}/{newest.key_id}/revoke", headers=token)).status_code == 404
        async with signed_in(server.app, administrator) as other:
            assert (await other.get("/console/admin")).text.count("revoked") >= 1
    assert await server.services.auth.tenant_of(key) is None

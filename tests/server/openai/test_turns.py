"""Long chats hold up no other tenant's, and what a revoked key has queued is not sampled."""

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainhouse.schemas.chats import template as template_module
from trainhouse.server.tenants.auth import create_key, hash_key, revoke_key
from trainhouse.workers.dispatch import WorkerDispatch

from ...letters import letter_tokenizer
from ..real import ALICE, BOB, MODEL, Server, running_server, server_config

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

# Takes as long as it may for a message of the role "slow".
TEMPLATE = """{% for message in messages %}{% if message.role == 'slow' %}{% for i in range(99999) %}{% for j in
range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ message.content }}{% endfor %}"""


@pytest.fixture
async def server(dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path) -> AsyncIterator[Server]:
    model = tmp_path / "model"
    shutil.copytree(tiny_models["qwen3"], model)
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    async with running_server(server_config(model, tmp_path / "state"), dispatch) as running:
        await running.services.tokenizers.get(MODEL)
        yield running


async def ask(client: httpx.AsyncClient, role: str = "user") -> httpx.Response:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": role, "content": "the"}], "max_tokens": 1}
    return await client.post("http://test/v1/chat/completions", content=json.dumps(body))


async def test_a_tenants_slow_chats_hold_up_no_other_tenant(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "_RENDER_SECONDS", 8.0)
    slow = [asyncio.create_task(ask(server.clients[ALICE], "slow")) for _ in range(2)]
    await asyncio.sleep(0.5)
    answer = await ask(server.clients[BOB])
    assert answer.status_code == 200, answer.text
    assert not any(one.done() for one in slow)
    for answer in await asyncio.gather(*slow):
        assert answer.status_code == 400 and "takes longer than 8 s: send fewer messages" in answer.text


async def test_a_chat_whose_key_is_revoked_while_it_waits_is_not_sampled(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, sampled = server.services, []
    key = await create_key(services.store, "team")
    tenant = await services.auth.authenticate(key)
    sample_now = services.sampling.sample_now
    monkeypatch.setattr(
        services.sampling, "sample_now", lambda job, *others: sampled.append(job) or sample_now(job, *others)
    )
    client = server.clients[ALICE]
    client.headers["X-API-Key"] = key
    assert (await ask(client)).status_code == 200 and len(sampled) == 1

    turn = threading.Event()
    occupied = asyncio.create_task(services.tokenizers.run_in_thread(tenant.id, turn.wait))
    asked = asyncio.create_task(ask(client))
    await asyncio.sleep(0.5)
    assert not asked.done(), "it waits for its turn"
    record = await services.store.keys.find(hash_key(key))
    assert record is not None
    await revoke_key(services.store, record.key_id)
    await asyncio.sleep(0.1)
    turn.set()
    await occupied
    answer = await asked
    assert answer.status_code == 401 and "unknown or revoked" in answer.text
    assert len(sampled) == 1

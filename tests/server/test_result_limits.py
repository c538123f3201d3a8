"""Results: what a request asks for beside its samples is bounded, charged to its tenant before the work, and counted
while it is kept."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from trainhouse.server.config import ServerConfig
from trainhouse.workers.dispatch import WorkerDispatch

from .real import BOB, MODEL, Server, batch, running_server, sample, sample_body, server_config

pytestmark = pytest.mark.anyio

ALTERNATIVES = ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")


@pytest.fixture
async def serve(
    tiny_models: dict[str, Path], tmp_path: Path, dispatch: WorkerDispatch
) -> AsyncIterator[Callable[..., Any]]:
    """A server with these options on the same state; the next one is a restart."""
    async with AsyncExitStack() as stack:

        async def serve(**options: Any) -> Server:
            await stack.aclose()
            config: ServerConfig = server_config(tiny_models["qwen3"], tmp_path / "state", **options)
            return await stack.enter_async_context(running_server(config, dispatch))

        yield serve


async def sampler_of(server: Server, key: str = "tml-alice") -> str:
    body = {"session_id": await server.create_session(key), "sampling_session_seq_id": 0, "base_model": MODEL}
    return (await server.post("create_sampling_session", body, key))["sampling_session_id"]


@pytest.mark.parametrize("name", ALTERNATIVES)
async def test_alternatives_are_bounded_by_a_knob(serve: Callable, name: str) -> None:
    server = await serve()
    body = sample_body(await sampler_of(server))
    assert (
        f"{name} 21 exceeds the 20"
        in (refused := await server.post("asample", body | {name: 21}, status=400))["detail"]
    )
    assert "--max-logprobs 21" in refused["detail"]
    assert len((await sample(server, body | {name: 20})).sequences) == 1
    server = await serve(max_logprobs=30)
    body = sample_body(await sampler_of(server))
    assert len((await sample(server, body | {name: 30})).sequences) == 1
    assert (
        f"{name} 31 exceeds the 30"
        in (await server.post("asample", body | {"seq_id": 1, name: 31}, status=400))["detail"]
    )


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("completions", {"prompt": [5, 6]}, "logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}, "top_logprobs"),
    ],
)
async def test_openais_alternatives_are_bounded_by_the_same_knob(
    serve: Callable, path: str, fields: dict, name: str
) -> None:
    server = await serve(max_logprobs=3)
    body = {"model": MODEL, "max_tokens": 1, name: 4} | fields
    response = await server.clients["tml-alice"].post(f"http://test/v1/{path}", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name and f"{name} 4 exceeds the 3" in error["message"], error


async def test_a_result_is_charged_before_the_work_by_what_was_asked_for(serve: Callable) -> None:
    server = await serve(tenant_queued_bytes=300_000)
    sampler_id, params = await sampler_of(server), {"max_tokens": 900, "stop": [], "seed": 1}
    long = sample_body(sampler_id, sampling_params=params, topk_sample_logprobs=20)
    submitted = await server.post("asample", long)
    used = (await server.clients["tml-alice"].get("limits")).json()["queued_bytes"]["used"]
    assert used == pytest.approx(8 * 900 * 21, rel=0.05)
    refused = await server.post("asample", long | {"seq_id": 1}, status=429)
    assert "this one has" in refused["detail"] and "--tenant-queued-bytes" in refused["detail"]
    small = sample_body(sampler_id, 2)
    assert len((await sample(server, small)).sequences) == 1, "what fits comes in beside it"
    assert len((await server.result(submitted["request_id"]))["sequences"][0]["topk_logprobs"]) == 900
    assert (await server.clients["tml-alice"].get("limits")).json()["queued_bytes"]["used"] == 0


async def test_a_result_beyond_all_quotas_is_refused_with_the_remedy(serve: Callable) -> None:
    server = await serve(tenant_queued_bytes=300_000)
    body = sample_body(await sampler_of(server), num_samples=3, sampling_params={"max_tokens": 900})
    refused = await server.post("asample", body | {"topk_sample_logprobs": 20}, status=400)
    assert "the result may take 453600 bytes, and 300000 are the most: lower num_samples" in refused["detail"]


async def test_kept_results_are_counted_and_put_off_more_samples_until_they_go(serve: Callable) -> None:
    server = await serve()
    sampler_id = await sampler_of(server)
    asked = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5] * 500}]}, "topk_prompt_logprobs": 20}
    await sample(server, sample_body(sampler_id) | asked)
    used = await kept(server)
    assert 80_000 < used < 90_000 and await kept(server, BOB) == 0

    server = await serve(tenant_result_bytes=100_000)
    assert await kept(server) == pytest.approx(used, abs=2000), "also over a restart"
    refused = await server.post("asample", sample_body(sampler_id, 1) | asked, status=429)
    assert f"results of yours take {await kept(server)} bytes" in refused["detail"]
    assert "--tenant-result-bytes" in refused["detail"] and "--result-ttl-seconds" in refused["detail"]
    assert len((await sample(server, sample_body(await sampler_of(server, BOB)) | asked, BOB)).sequences) == 1
    run = await server.create_run()
    await run.forward_backward(batch())
    assert "error" not in await run.optim_step(), "training goes on"

    server = await serve(tenant_result_bytes=100_000, result_ttl_seconds=0.01)
    async with asyncio.timeout(60):
        while await kept(server):
            await server.services.futures.expire()
    assert len((await sample(server, sample_body(sampler_id, 2) | asked)).sequences) == 1


async def kept(server: Server, key: str = "tml-alice") -> int:
    limits = (await server.clients[key].get("limits")).json()
    assert limits["result_bytes"]["limit"] == server.services.config.tenant_result_bytes
    return limits["result_bytes"]["used"]


async def test_a_sparse_question_about_a_prompt_cannot_be_made_into_a_large_one(serve: Callable) -> None:
    server = await serve()
    sparse = {
        "data": [5],
        "dtype": "int64",
        "shape": [2, 3_000_000],
        "sparse_crow_indices": [0, 1, 1],
        "sparse_col_indices": [7],
    }
    body = sample_body(await sampler_of(server), target_prompt_logprobs=sparse)
    assert "sparse tensors" in (await server.post("asample", body, status=400))["detail"]
    narrow = sparse | {"shape": [2, 300]}
    assert len((await sample(server, body | {"target_prompt_logprobs": narrow})).sequences) == 1

"""Results: log-probabilities of alternatives are bounded, charged to the tenant at submit, and counted while kept."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.requests import ClientDisconnect
from trainhouse.schemas.codec import decode_sample_response, encode_sample_response_json
from trainhouse.schemas.sampling import SampleResponse, TopkLogprobs
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.journal.completion_log import MAX_COMPLETIONS_PER_RESPONSE, CompletionLog
from trainhouse.server.journal.futures import ResultSummary
from trainhouse.server.routes.futures import _LargeResponse
from trainhouse.server.tenants.quotas import Reservation
from trainhouse.workers.dispatch import WorkerDispatch

from ..api import needs_openai
from ..real import BOB, MODEL, PROTOBUF, Server, batch, running_server, sample, sample_body, server_config

pytestmark = pytest.mark.anyio

ALTERNATIVES = ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")


@pytest.fixture
async def serve(
    tiny_models: dict[str, Path], tmp_path: Path, dispatch: WorkerDispatch
) -> AsyncIterator[Callable[..., Any]]:
    """Yields a function that starts a server with options. Calling it again restarts the server on the same state."""
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
async def test_alternatives_are_bounded_by_an_option(serve: Callable, name: str) -> None:
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


@needs_openai
@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("completions", {"prompt": [5, 6]}, "logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}, "top_logprobs"),
    ],
)
async def test_alternatives_in_the_openai_api_are_bounded_by_the_same_option(
    serve: Callable, path: str, fields: dict, name: str
) -> None:
    server = await serve(max_logprobs=3)
    body = {"model": MODEL, "max_tokens": 1, name: 4} | fields
    response = await server.clients["tml-alice"].post(f"http://test/v1/{path}", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name and f"{name} 4 exceeds the 3" in error["message"], error


@pytest.mark.slow
async def test_a_result_is_charged_at_submit_by_its_largest_size(serve: Callable) -> None:
    server = await serve(tenant_queued_bytes=300_000)
    sampler_id, params = await sampler_of(server), {"max_tokens": 900, "stop": [], "seed": 1}
    long = sample_body(sampler_id, sampling_params=params, topk_sample_logprobs=20)
    submitted = await server.post("asample", long)
    used = (await server.clients["tml-alice"].get("limits")).json()["queued_bytes"]["used"]
    assert used == pytest.approx(8 * 900 * 21, rel=0.05)
    refused = await server.post("asample", long | {"seq_id": 1}, status=429)
    assert "this one has" in refused["detail"] and "--tenant-queued-bytes" in refused["detail"]
    small = sample_body(sampler_id, 2)
    assert len((await sample(server, small)).sequences) == 1, "a request that fits is accepted"
    assert len((await server.result(submitted["request_id"]))["sequences"][0]["topk_logprobs"]) == 900
    assert (await server.clients["tml-alice"].get("limits")).json()["queued_bytes"]["used"] == 0


async def test_a_result_beyond_all_quotas_is_refused_with_the_remedy(serve: Callable) -> None:
    server = await serve(tenant_queued_bytes=300_000)
    body = sample_body(await sampler_of(server), num_samples=3, sampling_params={"max_tokens": 900})
    refused = await server.post("asample", body | {"topk_sample_logprobs": 20}, status=400)
    assert "the result may take 453600 bytes, and the limit is 300000: lower num_samples" in refused["detail"]


async def test_kept_results_throttle_more_samples_until_they_expire(serve: Callable) -> None:
    server = await serve()
    sampler_id = await sampler_of(server)
    asked = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5] * 500}]}, "topk_prompt_logprobs": 20}
    await sample(server, sample_body(sampler_id) | asked)
    used = await result_bytes(server)
    assert 80_000 < used < 90_000 and await result_bytes(server, BOB) == 0

    server = await serve(tenant_result_bytes=100_000)
    assert await result_bytes(server) == pytest.approx(used, abs=2000), "also after a restart"
    refused = await server.post("asample", sample_body(sampler_id, 1) | asked, status=429)
    assert f"your results take {await result_bytes(server)} bytes" in refused["detail"]
    assert "--tenant-result-bytes" in refused["detail"] and "--result-ttl-seconds" in refused["detail"]
    assert len((await sample(server, sample_body(await sampler_of(server, BOB)) | asked, BOB)).sequences) == 1
    run = await server.create_run()
    await run.forward_backward(batch())
    assert "error" not in await run.optim_step(), "training continues"

    server = await serve(tenant_result_bytes=100_000, result_ttl_seconds=0.01)
    async with asyncio.timeout(60):
        while await result_bytes(server):
            await server.services.futures.expire()
    assert len((await sample(server, sample_body(sampler_id, 2) | asked)).sequences) == 1


async def result_bytes(server: Server, key: str = "tml-alice") -> int:
    limits = (await server.clients[key].get("limits")).json()
    assert limits["result_bytes"]["limit"] == server.services.config.limits.tenant_result_bytes
    return limits["result_bytes"]["used"]


async def test_sparse_target_prompt_logprobs_cannot_expand_to_a_large_tensor(serve: Callable) -> None:
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


MAX_SHARE = 0.1
"""The share of the work for which no other task runs: 0.03 if it is done in pieces, 0.2 to 0.4 if not."""

LARGE = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5] * 1000}]}, "topk_prompt_logprobs": 512}


async def longest_wait(work: "asyncio.Future[Any]") -> tuple[float, float]:
    """Returns the longest time for which no other task ran, and the time of the work, in seconds.

    Both are CPU time of this process, because a busy machine stops all of it.
    """
    began = last = time.process_time()
    longest = 0.0
    while not work.done():
        await asyncio.sleep(0)
        now = time.process_time()
        longest, last = max(longest, now - last), now
    return longest, last - began


@pytest.mark.slow
async def test_a_large_result_is_encoded_in_pieces_between_other_tasks(serve: Callable) -> None:
    server = await serve(max_logprobs=512)
    submitted = await server.post("asample", sample_body(await sampler_of(server)) | LARGE)
    binary = await server.retrieve(submitted["request_id"], accept=PROTOBUF)
    assert len(binary.content) > 4_000_000 and binary.headers["content-length"] == str(len(binary.content))
    working = asyncio.ensure_future(server.retrieve(submitted["request_id"]))
    longest, whole = await longest_wait(working)
    assert longest < MAX_SHARE * whole, f"no other task ran for {longest:.3f} s of {whole:.3f} s"
    answer = json.loads(working.result().content)
    expected = encode_sample_response_json(decode_sample_response(binary.content))
    assert answer == json.loads(json.dumps(expected)) and len(answer["topk_prompt_logprobs"][999]) == 512
    assert server.services.quotas.server_usage.num_bytes_sending == 0


@pytest.mark.slow
async def test_encoding_a_large_result_at_once_blocks_other_tasks() -> None:
    """This is the negative control for MAX_SHARE."""
    top = TopkLogprobs(np.zeros((1000, 512), np.int32), np.zeros((1000, 512), np.float32))
    response = SampleResponse((), topk_prompt_logprobs=top)
    shares = []
    for _ in range(4):  # on a busy machine, other tasks may run in some tries
        working = asyncio.ensure_future(asyncio.to_thread(lambda: json.dumps(encode_sample_response_json(response))))
        longest, whole = await longest_wait(working)
        shares.append(longest / whole)
    assert max(shares) > MAX_SHARE


async def test_large_results_being_sent_are_bounded_per_tenant(serve: Callable) -> None:
    server = await serve(max_logprobs=512, tenant_queued_bytes=20_000_000)
    submitted = await server.post("asample", sample_body(await sampler_of(server)) | LARGE)
    assert (await server.retrieve(submitted["request_id"], accept=PROTOBUF)).status_code == 200
    slow = Reservation(server.services.quotas, (await server.services.auth.authenticate("tml-alice")).id)
    slow.claim_result(4_000_000)
    refused = await server.retrieve(submitted["request_id"], accept=PROTOBUF)
    assert refused.status_code == 429 and "are being sent to you" in refused.json()["detail"]
    slow.release()
    assert (await server.retrieve(submitted["request_id"])).status_code == 200, "one may be of any size"
    assert server.services.quotas.server_usage.num_bytes_sending == 0


@pytest.mark.slow
async def test_an_accepted_submit_returns_its_id_if_the_result_cannot_be_sent(
    serve: Callable,
) -> None:
    """A refusal would make the client send it again, and it would run twice where the server numbers requests."""
    server = await serve(max_logprobs=512, tenant_queued_bytes=20_000_000)
    slow = Reservation(server.services.quotas, (await server.services.auth.authenticate("tml-alice")).id)
    slow.claim_result(4_000_000)
    sampler_id = await sampler_of(server)
    submitted = await server.post("asample", sample_body(sampler_id) | LARGE, Prefer="wait=30")
    slow.release()
    assert len((await server.result(submitted["request_id"]))["topk_prompt_logprobs"]) == 1000
    waited = await server.post("asample", sample_body(sampler_id, 1) | LARGE, Prefer="wait=30")
    assert len(waited["topk_prompt_logprobs"]) == 1000


async def test_a_disconnected_client_releases_the_room_of_its_answer(serve: Callable) -> None:
    server = await serve()
    scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "headers": []}

    async def disconnected(message: object) -> None:
        raise OSError("the client has left")

    quotas = server.services.quotas
    sending = Reservation(quotas, "alice")
    sending.claim_result(1 << 20)
    with pytest.raises(ClientDisconnect):
        await _LargeResponse([b"x"], PROTOBUF, sending)(scope, pytest.fail, disconnected)
    assert quotas.server_usage.num_bytes_sending == 0


def test_many_completions_are_reported_page_by_page() -> None:
    async def pages() -> list[int]:
        log = CompletionLog()
        log.filling.set_result(None)
        for number in range(2 * MAX_COMPLETIONS_PER_RESPONSE + 5):
            log.add(ResultSummary(f"s:sample:0:{number}", is_error=False, num_bytes=1))
        reported, sizes = [], []
        while log.has_unseen.is_set():
            sizes.append(len(log.unseen()))
            reported += [one.request_id for one in log.unseen()]
            log.acknowledge(log.cursor)
        assert reported == [f"s:sample:0:{number}" for number in range(2 * MAX_COMPLETIONS_PER_RESPONSE + 5)]
        return sizes

    assert asyncio.run(pages()) == [MAX_COMPLETIONS_PER_RESPONSE, MAX_COMPLETIONS_PER_RESPONSE, 5]

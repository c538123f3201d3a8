"""/metrics: what Prometheus reads of a server with a real worker."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from trainhouse.server.tenants.auth import create_key
from trainhouse.server.tenants.scopes import OPERATOR, TENANT_SCOPES
from trainhouse.workers.dispatch import WorkerDispatch

from ..real import ALICE, MODEL, Server, batch, running_server, sample_body, server_config

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

Series = dict[tuple[str, ...], float]


@pytest.fixture
async def server(dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path) -> AsyncIterator[Server]:
    async with running_server(server_config(tiny_models["qwen3"], tmp_path / "state"), dispatch) as running:
        yield running


async def series(server: Server) -> Series:
    """Returns all values by name and labels."""
    response = await server.clients[ALICE].get("http://test/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


async def test_metrics_count_what_was_done(server: Server, dispatch: WorkerDispatch) -> None:
    run = await server.create_run()
    data = batch()
    for _ in range(3):
        await run.forward_backward(data)
        await run.optim_step()
    assert "error" in await run.optim_step()
    sampler = await server.post(
        "create_sampling_session", {"session_id": run.session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
    )
    submitted = await server.post("asample", sample_body(sampler["sampling_session_id"]))
    await server.result(submitted["request_id"])
    found = await series(server)
    tokens = 3 * sum(len(each.model_input.to_ints()) for each in data)
    assert found["trainhouse_trained_tokens_total", "forward_backward"] == tokens
    assert (
        found["trainhouse_pass_tokens_sum", MODEL] == tokens and found["trainhouse_pass_operations_count", MODEL] == 3
    )
    assert found["trainhouse_operation_busy_seconds_count", "optim_step", "ok"] == 3
    assert found["trainhouse_operation_busy_seconds_count", "optim_step", "failed"] == 1
    assert found["trainhouse_operation_busy_seconds_sum", "forward_backward", "ok"] > 0
    assert found["trainhouse_call_seconds_count", "pass", MODEL] == 3
    assert found["trainhouse_sampled_tokens_total", MODEL] == 4 and found["trainhouse_prompt_tokens_total", MODEL] == 3
    assert found["trainhouse_http_request_seconds_count", "POST /api/v1/forward_backward", "2xx"] == 3
    assert found["trainhouse_group_activity", "idle", MODEL] == 1
    assert found["trainhouse_live_runs",] == 1 and found["trainhouse_open_sessions",] == 1
    assert found["trainhouse_memory", MODEL, "base_weights"] > 0
    assert found["trainhouse_memory", MODEL, "num_adapters_on_device"] == 1
    assert found["trainhouse_memory", MODEL, "kv_cache"] > found["trainhouse_memory", MODEL, "kv_cache_held"] == 0
    # Created, 3 times 2 operations, a refused step, and the sample.
    assert found["trainhouse_journal_write_seconds_count",] == 9
    assert 0 < found["trainhouse_journal_entries",] <= 9
    assert found["trainhouse_pass_idle_tokens_total", MODEL] == 0, "one rank waits for no other"
    assert found["trainhouse_worker_deaths_total", MODEL] == 0
    os.kill(dispatch.pids(MODEL)[0], signal.SIGKILL)
    await run.forward_backward(data)
    assert (await series(server))["trainhouse_worker_deaths_total", MODEL] == 1


async def test_no_client_adds_series(server: Server) -> None:
    async def strange_requests(word: str) -> None:
        run = await server.create_run()
        await server.clients[ALICE].get(f"training_runs/{word}/checkpoints")
        await server.clients[ALICE].get(f"{word}/{word}")
        await server.clients[ALICE].request(word[:8].upper(), "training_runs")
        await server.post(
            "create_model", {"session_id": run.session_id, "base_model": word, "model_seq_id": 9}, status=400
        )
        await run.submit("forward", loss_fn=word, data=[], status=400)
        await series(server)

    await strange_requests("first")
    before = (await series(server)).keys()
    for number in range(5):
        await strange_requests(f"other{number}")
    assert (await series(server)).keys() == before


async def test_with_keys_only_operators_read_metrics(server: Server) -> None:
    client = server.clients[ALICE]
    for scopes, status in ((TENANT_SCOPES, 403), ((OPERATOR,), 200)):
        client.headers["X-API-Key"] = await create_key(server.services.store, f"of-{status}", scopes)
        response = await client.get("http://test/metrics")
        assert response.status_code == status and ("trainhouse_live_runs" in response.text) == (status == 200)
    client.headers["X-API-Key"] = "tml-unknown"
    assert (await client.get("http://test/metrics")).status_code == 401

"""Limits: requests over them are throttled and never lost, and accepted operations finish; other tenants are
unaffected."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from trainhouse.schemas.errors import RequestError
from trainhouse.schemas.training import OptimStepRequest
from trainhouse.server.config.option_values import TenantWeight
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.http.bodies import UNLIMITED, Body
from trainhouse.server.journal.journal import request_id_of
from trainhouse.server.operations.registry import operation_of
from trainhouse.server.runs.run import Run
from trainhouse.server.store import DATABASE_NAME, SqliteStore
from trainhouse.server.tenants.auth import Tenant, create_key
from trainhouse.server.tenants.quotas import UNORDERED, QueuePosition, Quotas, Reservation
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.worker_config import ServedModel

from ..api import DRAFTS, Clock
from ..bench import Bench, MakeBench
from ..real import ADAM, ALICE, BOB, Server, batch, running_server, sample_body, server_config

pytestmark = pytest.mark.anyio

JSON_ZSTD = {"Content-Type": "application/json", "Content-Encoding": "zstd"}
NEEDED = QueuePosition("run", may_unblock=True)
EARLY = QueuePosition("run", is_ready=False, may_unblock=True)


def quotas(clock: Clock | None = None, **limits: int) -> Quotas:
    config = ServerConfig.of(base_models=(ServedModel("tiny", "tiny"),), **({"max_body_bytes": 100} | limits))  # pyright: ignore[reportArgumentType]
    return Quotas(config, clock or Clock())


def accept(quotas: Quotas, num_bytes: int, standing: QueuePosition = UNORDERED, tenant: str = "alice") -> Reservation:
    """Admits an operation as a route does; raises RequestError with status 429 if it is over a limit."""
    with Reservation(quotas, tenant) as reservation:
        if not reservation.try_claim(num_bytes):
            reservation.claim(num_bytes, standing)
        reservation.keep(num_bytes, num_tokens=10)
    return reservation


def used(quotas: Quotas, tenant: str = "alice") -> tuple[int, int, int]:
    limits = quotas.limits(Tenant(tenant, tenant), 0)
    return limits.queued_operations.used, limits.queued_bytes.used, limits.server_queued_bytes.used


def test_a_tenant_at_a_limit_is_throttled_and_another_is_not() -> None:
    server_quotas = quotas(tenant_queued_operations=2, tenant_queued_bytes=150)
    first = accept(server_quotas, 100)
    with pytest.raises(RequestError, match=r"operations have 100 bytes, this one has 60.*limit is 150") as refusal:
        accept(server_quotas, 60)
    assert (refusal.value.status, refusal.value.retry_after_seconds) == (429, 5.0)
    accept(server_quotas, 50)
    with pytest.raises(RequestError, match=r"2 of your operations.*limit is 2 .*--tenant-queued-operations"):
        accept(server_quotas, 0)
    accept(server_quotas, 100, tenant="bob")
    first.release()
    accept(server_quotas, 60)
    assert (used(server_quotas), used(server_quotas, "bob")) == ((2, 110, 210), (1, 100, 210))


def test_a_reservation_is_released_once() -> None:
    server_quotas = quotas()
    reservation = accept(server_quotas, 50)
    reservation.release()
    reservation.release()
    with pytest.raises(ValueError), Reservation(server_quotas, "alice") as broken:
        broken.try_claim(70)
        assert used(server_quotas) == (1, 70, 70)
        raise ValueError
    with Reservation(server_quotas, "alice") as duplicate:
        duplicate.try_claim(70)
    assert used(server_quotas) == (0, 0, 0)


def test_an_operation_may_hold_another_size_than_its_body() -> None:
    server_quotas = quotas()
    with Reservation(server_quotas, "alice") as reservation:
        reservation.try_claim(50)
        reservation.keep(80, 0)
    assert used(server_quotas) == (1, 80, 80)
    reservation.release()
    assert used(server_quotas) == (0, 0, 0)


def test_tokens_per_minute_refill_over_time() -> None:
    clock = Clock()
    server_quotas = quotas(clock, tenant_tokens_per_minute=60)
    reservation = accept(server_quotas, 1)
    reservation.charge(90)
    with pytest.raises(RequestError, match=r"used 100 tokens.*limit is 60 .*40 s") as refusal:
        accept(server_quotas, 1)
    assert refusal.value.retry_after_seconds == pytest.approx(40)
    assert server_quotas.limits(Tenant("alice", "Alice"), 0).tokens_per_minute.used == 100
    assert accept(server_quotas, 1, NEEDED) and accept(server_quotas, 1, tenant="bob")
    clock.now += 51
    accept(server_quotas, 1)
    clock.now += 3600
    assert server_quotas.limits(Tenant("alice", "Alice"), 0).tokens_per_minute.used == 0, (
        "unused minutes are not saved up"
    )


def test_retry_after_follows_the_throughput() -> None:
    clock = Clock()
    server_quotas = quotas(clock, tenant_queued_operations=20)
    queue = [accept(server_quotas, 1) for _ in range(20)]
    for reservation in queue[:10]:
        clock.now += 2
        reservation.release()
        accept(server_quotas, 1)
    with pytest.raises(RequestError) as refusal:
        accept(server_quotas, 1)
    assert refusal.value.retry_after_seconds == pytest.approx(2, rel=0.5)
    clock.now += 3600
    queue[10].release()
    accept(server_quotas, 1)
    with pytest.raises(RequestError) as refusal:
        accept(server_quotas, 1)
    assert 2 < (refusal.value.retry_after_seconds or 0) <= 5, "a pause is no measure of the throughput"


def test_polls_report_a_recent_refusal() -> None:
    clock = Clock()
    server_quotas = quotas(clock, tenant_queued_operations=1)
    assert server_quotas.pending("alice") is None
    accept(server_quotas, 1).release()
    accept(server_quotas, 1)
    with pytest.raises(RequestError):
        accept(server_quotas, 1)
    pending = server_quotas.pending("alice")
    assert pending is not None and pending.queue_state == "paused_rate_limit"
    assert "--tenant-queued-operations" in (pending.queue_state_reason or "")
    clock.now += 120
    assert server_quotas.pending("alice") is None and server_quotas.pending("bob") is None


def test_idle_tenants_are_forgotten_and_busy_ones_are_not() -> None:
    clock = Clock()
    server_quotas = quotas(clock, tenant_tokens_per_minute=100)
    for tenant in ("alice", "bob"):
        accept(server_quotas, 1, tenant=tenant).release()
    accept(server_quotas, 1, tenant="alice")
    server_quotas.forget_idle()
    assert set(server_quotas._usages) == {"alice", "bob"}, "both have used tokens"
    clock.now += 60
    server_quotas.forget_idle()
    assert set(server_quotas._usages) == {"alice"}


def test_half_of_the_memory_is_kept_for_operations_that_can_run() -> None:
    """Even the run that has been stalled longest must leave room for the largest such operation."""
    server_quotas = quotas(queued_bytes=400, tenant_queued_bytes=1000)
    for _ in range(2):
        accept(server_quotas, 100, EARLY, "bob")
    other = QueuePosition("other run", is_ready=False, may_unblock=True)
    with pytest.raises(RequestError, match="queued operations of all tenants") as refusal:
        accept(server_quotas, 100, QueuePosition("run", is_ready=False))
    assert refusal.value.status == 429
    accept(server_quotas, 100, EARLY, "bob")  # the run that has been stalled longest
    with pytest.raises(RequestError):
        accept(server_quotas, 1, EARLY, "bob")
    with pytest.raises(RequestError):
        accept(server_quotas, 1, other, "bob")
    ready = accept(server_quotas, 100)
    with pytest.raises(RequestError):
        accept(server_quotas, 1)
    ready.release()
    accept(server_quotas, 100)


def test_precedence_passes_on_when_the_first_run_moves_or_goes_silent() -> None:
    clock = Clock()
    server_quotas = quotas(clock, queued_bytes=400, tenant_queued_bytes=1000)
    runs = [QueuePosition(f"run {number}", is_ready=False, may_unblock=True) for number in range(3)]
    held = [accept(server_quotas, 100) for _ in range(4)]
    for run in runs:
        with pytest.raises(RequestError):
            accept(server_quotas, 10, run)
    for reservation in held[2:]:
        reservation.release()
    with pytest.raises(RequestError):
        accept(server_quotas, 10, runs[1])
    server_quotas.mark_unstalled("alice", "run 0")
    accept(server_quotas, 10, runs[1])
    clock.now += 61
    accept(server_quotas, 10, runs[2])


# Runs: everything finishes in any order of arrival


class Client:
    """Sends operations of a run as a route and an SDK do, retrying each until it is accepted."""

    def __init__(self, run: Run, quotas: Quotas, random: random.Random) -> None:
        self.run = run
        self.quotas = quotas
        self.random = random
        self.num_throttled = 0
        self.most_bytes = 0

    async def send(self, seq_id: int, num_bytes: int) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(0, 0.01))
            with Reservation(self.quotas, self.run.record.tenant_id) as reservation:
                try:
                    if not reservation.try_claim(num_bytes):
                        reservation.claim(num_bytes, self.run.queue.position_of(seq_id))
                except RequestError as error:
                    assert error.status == 429
                    self.num_throttled += 1
                    continue
                self.most_bytes = max(self.most_bytes, used(self.quotas)[2])
                operation = OptimStepRequest(model_id=self.run.record.run_id, seq_id=seq_id)
                await self.run.submit(seq_id, operation_of(operation), Body(b"x" * num_bytes, UNLIMITED), reservation)
                return


@pytest.fixture
async def benches(make_bench: MakeBench) -> AsyncIterator:
    async def make(num_runs: int, **limits: int) -> list[Bench]:
        server_quotas = quotas(None, **limits)
        made = [await make_bench(number=number, quotas=server_quotas) for number in range(num_runs)]
        await asyncio.gather(*(bench.result(0) for bench in made))
        return made

    yield make


@pytest.mark.parametrize("seed", range(4))
async def test_any_order_of_arrival_finishes_under_any_limit(benches, seed: int) -> None:
    """The smallest of these limits allows one operation at a time."""
    chance = random.Random(seed)
    runs = await benches(3, tenant_queued_operations=1, tenant_queued_bytes=50, queued_bytes=400)
    clients = [Client(bench.run, bench.quotas, chance) for bench in runs]
    async with asyncio.timeout(60):
        sends = [(client, seq_id) for client in clients for seq_id in range(1, 31)]
        chance.shuffle(sends)
        await asyncio.gather(*(client.send(seq_id, chance.randint(1, 100)) for client, seq_id in sends))
        await asyncio.gather(*(bench.result(30) for bench in runs))
    assert [bench.operations.performed for bench in runs] == [list(range(31))] * 3
    assert max(client.most_bytes for client in clients) <= 400
    assert all(client.num_throttled for client in clients)
    assert used(runs[0].quotas) == (0, 0, 0)


@pytest.mark.parametrize("of_tenant", [{"tenant_queued_operations": 4}, {"tenant_queued_bytes": 320}, {}])
async def test_chunks_are_all_accepted_if_the_first_is_sent_last(benches, of_tenant: dict[str, int]) -> None:
    """The SDK sends the first chunk after all others were accepted; together they exceed the memory limit.

    The tenant's limits have room for the chunks of one run, not for those of four stalled runs.
    """
    runs = await benches(4, queued_bytes=1000, **of_tenant)
    clients = [Client(bench.run, bench.quotas, random.Random(0)) for bench in runs]

    async def send_batches(client: Client) -> None:
        for first in (1, 6, 11, 16):
            await asyncio.gather(*(client.send(seq_id, 80) for seq_id in range(first + 1, first + 5)))
            await client.send(first, 80)

    async with asyncio.timeout(30):
        await asyncio.gather(*map(send_batches, clients))
        await asyncio.gather(*(bench.result(20) for bench in runs))
    assert max(client.most_bytes for client in clients) <= 1000


async def test_operations_before_a_gap_let_no_others_past_the_limit(benches) -> None:
    """Negative control: if the run can continue by itself, the limit holds."""
    (bench,) = await benches(1, tenant_queued_operations=2)
    bench.operations.may_proceed.clear()
    await bench.optim_step(1)
    position = bench.run.queue.position_of(2)
    assert position.is_ready and not position.is_alone and not position.may_unblock
    await bench.optim_step(3)
    assert not bench.run.queue.position_of(4).may_unblock and not bench.run.queue.position_of(4).is_ready
    assert bench.run.queue.position_of(2).may_unblock, "it fills the gap"
    assert bench.run.queue.position_of(1).may_unblock, "it only needs its answer"
    bench.operations.may_proceed.set()
    await bench.result(1)
    assert bench.run.queue.position_of(4).may_unblock, "the client may send 2 only after this one is accepted"


@pytest.mark.parametrize("order", [range(2, 1001), range(1000, 1, -1)])
async def test_a_run_whose_first_operation_is_missing_stays_within_the_limits(benches, order: range) -> None:
    (bench,) = await benches(1, tenant_queued_operations=20, tenant_tokens_per_minute=60)
    num_throttled = 0
    for seq_id in order:
        with Reservation(bench.quotas, "alice") as reservation:
            try:
                if not reservation.try_claim(1):
                    reservation.claim(1, bench.run.queue.position_of(seq_id))
            except RequestError:
                num_throttled += 1
                continue
            operation = OptimStepRequest(model_id=bench.run.record.run_id, seq_id=seq_id)
            await bench.run.submit(seq_id, operation_of(operation), Body(b"x", UNLIMITED), reservation)
    assert (used(bench.quotas)[0], num_throttled) == (20, 999 - 20)
    Reservation(bench.quotas, "alice").charge(100)
    with pytest.raises(RequestError, match="40 s"), Reservation(bench.quotas, "alice") as reservation:
        reservation.claim(1, bench.run.queue.position_of(500))
    with Reservation(bench.quotas, "alice") as reservation:
        reservation.claim(1, bench.run.queue.position_of(1))


async def test_concurrent_uploads_of_a_run_stay_within_the_limits(benches) -> None:
    """No upload has been accepted yet."""
    (bench,) = await benches(1, tenant_queued_operations=20)
    await bench.optim_step(2)
    async with AsyncExitStack() as stack:
        for seq_id in range(3, 100):
            reservation = stack.enter_context(Reservation(bench.quotas, "alice"))
            try:
                reservation.claim(1, bench.run.queue.position_of(seq_id))
            except RequestError:
                continue
        assert used(bench.quotas)[0] == 20


async def test_polls_report_that_the_missing_operation_was_throttled(benches) -> None:
    (bench,) = await benches(1, tenant_queued_operations=1)
    await bench.optim_step(2)
    with pytest.raises(RequestError):
        accept(bench.quotas, 1)
    waiting = await bench.futures.wait(request_id_of(bench.run.record.run_id, 2), "alice", 0.01)
    assert waiting.queue_state == "paused_rate_limit"
    assert "seq_id 1, which has not arrived" in waiting.queue_state_reason
    assert "--tenant-queued-operations" in waiting.queue_state_reason


async def test_reservations_are_released_at_the_end_of_a_run_and_at_a_stop(benches) -> None:
    ended, stopped = await benches(2)
    for bench in (ended, stopped):
        bench.operations.may_proceed.clear()
        for seq_id in (1, 2, 5):
            await bench.optim_step(seq_id)
    assert used(ended.quotas)[0] == 6
    ending = asyncio.create_task(ended.run.end("its session has ended"))
    await asyncio.sleep(0.01)
    ended.operations.may_proceed.set()
    await ending
    assert used(ended.quotas)[0] == 3
    await stopped.run.stop()
    assert used(ended.quotas) == (0, 0, 0)


# Over HTTP, with a real worker


LIMITS = {
    "tenant_runs": 2,
    "tenant_queued_operations": 3,
    "tenant_tokens_per_minute": 600,
    "max_body_bytes": 100_000,
    "queued_bytes": 200_000,
}


@pytest.fixture
async def limited(dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path) -> AsyncIterator[Server]:
    async with running_server(server_config(tiny_models["qwen3"], tmp_path, **LIMITS), dispatch) as running:
        yield running


async def limits_of(server: Server, key: str = ALICE) -> dict[str, Any]:
    return (await server.clients[key].get("limits")).raise_for_status().json()


async def test_a_throttled_operation_uses_no_seq_id_and_can_be_retried(limited: Server) -> None:
    run, bobs = await limited.create_run(), await limited.create_run(BOB)
    for seq_id in (2, 3, 4):  # none of these can run before 1 arrives
        await run.submit("optim_step", seq_id=seq_id, adam_params=ADAM)
    assert (await limits_of(limited))["queued_operations"] == {"limit": 3, "used": 3}
    sampler = await limited.post(
        "create_sampling_session",
        {"session_id": run.session_id, "sampling_session_seq_id": 0, "base_model": "tiny/qwen3"},
    )
    throttled = await limited.clients[ALICE].post("asample", json=sample_body(sampler["sampling_session_id"]))
    assert throttled.status_code == 429 and "3 of your operations are queued" in throttled.json()["detail"]
    assert 0 < int(throttled.headers["Retry-After"]) <= 60
    assert 0 < int(throttled.headers["Retry-After-Ms"]) <= 60_000
    assert "metrics" in await bobs.do(
        "forward", loss_fn="cross_entropy", data=[{"model_input": [1], "loss_fn_inputs": {"target_tokens": [2]}}]
    )
    assert (await run.send(run.encode(batch(1), 1))).status_code == 200, "it fills the gap"
    assert "metrics" in await limited.result(f"{run.model_id}:2")
    assert "error" in await limited.result(f"{run.model_id}:4")
    again = await limited.clients[ALICE].post("asample", json=sample_body(sampler["sampling_session_id"]))
    assert again.status_code == 200, "the same seq_id as before"
    assert "sequences" in await limited.result(again.json()["request_id"])
    used = await limits_of(limited)
    assert (used["queued_operations"]["used"], used["server_queued_bytes"]["used"]) == (0, 0)


async def test_trained_and_sampled_tokens_count_against_the_limit(limited: Server) -> None:
    clock = limited.services.quotas.clock = Clock()
    run = await limited.create_run()
    before = (await limits_of(limited))["tokens_per_minute"]
    assert before == {"limit": 600, "used": 0}
    data = batch(2)
    await run.forward_backward(data)
    num_trained = sum(one.model_input.length for one in data)
    assert (await limits_of(limited))["tokens_per_minute"]["used"] == num_trained
    sampler = await run.do("save_weights_for_sampler")
    body = sample_body(sampler["sampling_session_id"], num_samples=8, sampling_params={"max_tokens": 90, "stop": []})
    await limited.result((await limited.post("asample", body))["request_id"])
    used = (await limits_of(limited))["tokens_per_minute"]["used"]
    assert num_trained + 8 * 90 < used <= num_trained + 3 + 8 * 90
    refused = await run.send(run.encode(data, seq_id := next(run.numbers)))
    assert refused.status_code == 429 and "tenant-tokens-per-minute" in refused.json()["detail"]
    assert float(refused.headers["Retry-After-Ms"]) == pytest.approx(1000 * (used - 600) / 10, abs=1)
    clock.now += (used - 600) / 10 - 0.1
    assert (await run.send(run.encode(data, seq_id))).status_code == 429
    clock.now += 0.11
    assert (await run.send(run.encode(data, seq_id))).status_code == 200


@pytest.mark.slow
async def test_tokens_per_minute_slow_training_down_to_the_limit(limited: Server) -> None:
    """A client that waits as long as Retry-After says is accepted then, and trains 600 tokens a minute."""
    clock = limited.services.quotas.clock = Clock()
    began, num_tokens, num_throttled = clock.now, 0, 0
    run, data = await limited.create_run(), batch(12)
    for _ in range(40):
        body = run.encode(data, next(run.numbers))
        answer = await run.send(body)
        if answer.status_code == 429:
            num_throttled += 1
            clock.now += float(answer.headers["Retry-After-Ms"]) / 1000 + 0.001
            answer = await run.send(body)
        assert answer.status_code == 200, answer.text
        assert "error" not in await limited.result(answer.json()["request_id"])
        assert num_tokens <= 600 + 10 * (clock.now - began), "a pass is accepted once there is no debt"
        num_tokens += sum(one.model_input.length for one in data)
    assert num_throttled > 30 and num_tokens == pytest.approx(600 + 10 * (clock.now - began), rel=0.1)


async def test_runs_are_limited_and_those_of_ended_sessions_do_not_count(limited: Server) -> None:
    first, second = await limited.create_run(), await limited.create_run()
    session_id = await limited.create_session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny/qwen3", "lora_config": {"rank": 2}}
    draft = {"lora_config": None, "model_role": "draft", "draft": {"algorithm": "eagle3"}} if DRAFTS else {}
    for other in ({}, draft):
        refused = await limited.clients[ALICE].post("create_model", json=body | other)
        assert refused.status_code == 429 and "2 live runs" in refused.json()["detail"]
    again = body | {"session_id": second.session_id, "lora_config": {"rank": 4, "seed": 1}}
    assert await limited.post("create_model", again) == {"request_id": f"{second.model_id}:0"}, "it already exists"
    await limited.create_run(BOB)
    await limited.post(f"sessions/{first.session_id}/finish", {"reason": {"type": "success"}}, status=204)
    assert (await limits_of(limited))["runs"] == {"limit": 2, "used": 1}
    await limited.post("create_model", body | draft)
    assert (await limits_of(limited))["runs"] == {"limit": 2, "used": 2}, "drafts count like other runs"


async def test_memory_is_reserved_before_a_body_is_read(limited: Server) -> None:
    """Four uploads of 80 kB compete for 200 kB; all begin before any ends."""
    may_end = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"model_id": "' + b"x" * 70_000
        await may_end.wait()
        yield b"y" * (80_000 - 70_014)

    async with AsyncExitStack() as stack:
        transport = httpx.ASGITransport(limited.app)
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://test"))
            for _ in range(4)
        ]
        headers = [{"X-API-Key": f"tml-{number}", "Content-Length": "80000"} for number in range(4)]
        uploads = [
            asyncio.create_task(client.post("/api/v1/optim_step", content=body(), headers=header))
            for client, header in zip(clients, headers, strict=True)
        ]
        await asyncio.sleep(0.5)
        assert (await limits_of(limited))["server_queued_bytes"]["used"] == 160_000
        may_end.set()
        statuses = sorted([answer.status_code for answer in await asyncio.gather(*uploads)])
    assert statuses == [400, 400, 429, 429]
    assert (await limits_of(limited))["server_queued_bytes"]["used"] == 0


async def test_memory_is_reserved_before_a_body_is_decompressed(limited: Server) -> None:
    """A body that does not fit uses no seq_id, with and without a declared size."""
    run = await limited.create_run()
    services = limited.services
    tenant = await services.auth.authenticate(ALICE)
    with Reservation(services.quotas, "bob") as held:
        held.claim(150_000, UNORDERED)
        text = json.dumps({"model_id": run.model_id, "seq_id": 1, "adam_params": ADAM}).encode()
        text += b" " * 90_000
        for declares in (True, False):
            body = zstandard.ZstdCompressor(write_content_size=declares).compress(text)
            assert len(body) < 500
            throttled = await limited.post_bytes("optim_step", body, **JSON_ZSTD)
            assert throttled.status_code == 429 and "Retry-After" in throttled.headers, throttled.text
            assert "this one has 90" in throttled.json()["detail"]
        assert services.quotas.limits(tenant, 0).queued_bytes.used == 0
    answer = await limited.post_bytes("optim_step", body, **JSON_ZSTD)
    assert answer.status_code == 200, "the seq_id was not used"
    assert "error" in await limited.result(answer.json()["request_id"]), "there are no gradients"
    assert (await limits_of(limited))["server_queued_bytes"]["used"] == 0


async def test_a_body_that_is_too_large_when_decompressed_is_refused(limited: Server) -> None:
    run = await limited.create_run()
    text = json.dumps({"model_id": run.model_id, "seq_id": 1, "x": "y" * 110_000}).encode()
    for declares in (True, False):
        body = zstandard.ZstdCompressor(write_content_size=declares).compress(text)
        refused = await limited.post_bytes("optim_step", body, **JSON_ZSTD)
        assert refused.status_code == 413 and "100000 bytes once decompressed" in refused.json()["detail"]


async def test_only_operators_see_the_usage_of_other_tenants(limited: Server) -> None:
    run, services = await limited.create_run(BOB), limited.services
    await run.do("save_weights", path="a")
    carol, operator = limited.clients[ALICE], limited.clients[BOB]
    carol.headers["X-API-Key"] = await create_key(services.store, "carol")
    operator.headers["X-API-Key"] = await create_key(services.store, "olga", ("operator",))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(limited.app), base_url="http://test/api/v1/"
    ) as anonymous:
        with Reservation(services.quotas, "bob") as held:
            held.claim(150_000, UNORDERED)
            assert (await limits_of(limited))["server_queued_bytes"] == {"limit": 200_000, "used": 0}
            assert (await limits_of(limited, BOB))["server_queued_bytes"]["used"] == 150_000
            throttled = await carol.post("optim_step", content=bytes(90_000))
            assert throttled.status_code == 429 and "150000" not in throttled.json()["detail"]
        refused = await carol.get("workers")
        assert refused.status_code == 403 and "needs operator" in refused.json()["detail"]
        assert (await operator.get("workers")).json()["groups"]
        counts = [(await client.get("readyz")).json()["runs"] for client in (anonymous, carol, operator)]
        assert counts == [None, None, 1]
    own = (await carol.get("auth/apikey/me")).json()
    assert own["scopes"] == ["train", "sample", "read", "admin"]


# Weights


async def test_tenant_weights_are_matched_by_the_names_of_keys(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The dispatch gets these names as tenants; a name without a key may be misspelt, so it is logged."""
    weights = (TenantWeight("carol", 2.0), TenantWeight("crol", 2.0))
    config = server_config(tiny_models["qwen3"], tmp_path, tenant_weights=weights)
    store = SqliteStore(tmp_path / DATABASE_NAME)
    key = await create_key(store, "carol")
    store.close()
    async with running_server(config, dispatch) as server:
        assert [record.message for record in caplog.records if "tenant_weights" in record.message] == [
            "tenant_weights names crol, which has no key yet: see `trainhouse keys list`"
        ]
        server.clients[ALICE].headers["X-API-Key"] = key
        run = await server.create_run()
        assert server.services.dispatch._locations[run.model_id].tenant_id == "carol"
        assert config.dispatch_config().tenant_weights["carol"] == 2.0
        assert (await limits_of(server))["tenant"] == "carol", "what to write into --tenant-weights"


async def test_a_base_url_that_includes_the_api_path_gets_a_hint(server: Server) -> None:
    answer = await server.clients[ALICE].post("http://test/api/v1/api/v1/client/config", json={})
    assert answer.status_code == 404
    assert answer.json()["detail"] == "the base URL is http://test/, without /api/v1: clients append that themselves"

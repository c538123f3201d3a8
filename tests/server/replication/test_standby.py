"""Standby: requests reach the holder unchanged, and clients receive its answers, or a 503 to retry."""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from trainhouse.server.replication import leases
from trainhouse.server.replication.leases import Lease
from trainhouse.server.replication.standby import LeaseGuard, Standby, SwitchableApp, TakeoverApp
from trainhouse.server.serving.connections import HttpConnection
from trainhouse.server.serving.server_process import bound_socket
from trainhouse.server.store import SqliteStore

from ..api import OPENAI
from ..files.test_syncing import Disk
from ..serving.test_connections import exchanging
from ..serving.test_tls import Files
from ..serving.test_tls import made as certificates

pytestmark = pytest.mark.anyio

PIECE = b"x" * (1 << 16)


class Holder:
    """Acts as the server that has the lease; each path is a behaviour."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.heard = asyncio.Event()
        self.may_continue = asyncio.Event()
        self.client_left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        behaviours = (self.echo, self.count, self.poll, self.refuse, self.two_pieces)
        by_name = {each.__name__: each for each in behaviours} | {"readyz": self.echo}
        await by_name[scope["path"].rpartition("/")[2]](receive, send)

    async def echo(self, receive: Receive, send: Send) -> None:
        """Sends back the body as it arrives."""
        headers = [(b"x-one", b"1"), (b"x-one", b"2"), (b"connection", b"x-hop"), (b"x-hop", b"1")]
        await send({"type": "http.response.start", "status": 418, "headers": headers})
        more = True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            await send({"type": "http.response.body", "body": message.get("body", b""), "more_body": more})

    async def count(self, receive: Receive, send: Send) -> None:
        """Returns the number of bytes of the body; reads on when `may_continue` is set."""
        num_bytes, more = 0, True
        while more:
            message = await receive()
            num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
            self.heard.set()
            await self.may_continue.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(num_bytes).encode()})

    async def poll(self, receive: Receive, send: Send) -> None:
        """Waits until `may_continue` is set or the client leaves."""
        while (await receive()).get("more_body"):
            pass
        self.heard.set()
        leaving, going = asyncio.ensure_future(receive()), asyncio.ensure_future(self.may_continue.wait())
        await asyncio.wait({leaving, going}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.client_left.set()
        for task in (leaving, going):
            task.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})

    async def refuse(self, receive: Receive, send: Send) -> None:
        """Refuses without reading the body."""
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def two_pieces(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await self.may_continue.wait()
        await send({"type": "http.response.body", "body": b"second"})


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(app: ASGIApp, certificate: Files | None = None) -> AsyncIterator[str]:
    """Serves the app and yields its URL."""
    settings = uvicorn.Config(
        app,
        http=HttpConnection,
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
        ssl_certfile=certificate and certificate.certificate,
        ssl_keyfile=certificate and certificate.key,
    )
    server = uvicorn.Server(settings)
    with bound_socket("127.0.0.1", 0) as listener:
        running = asyncio.create_task(server._serve([listener]))
        await wait_until(lambda: server.started)
        yield f"{'https' if certificate else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await running


@pytest.fixture
async def lease(tmp_path: Path) -> AsyncIterator[Lease]:
    store = SqliteStore(tmp_path / "leases.db")
    yield Lease(store, ["m"], "http://me", 0.5)
    store.close()


@pytest.fixture
async def holder(lease: Lease) -> AsyncIterator[Holder]:
    holder = Holder()
    async with serving(exchanging(holder)) as url:
        lease.holder_url = url
        yield holder


@pytest.fixture
async def standby(lease: Lease) -> AsyncIterator[Standby]:
    standby = Standby(lease)
    yield standby
    await standby.close()


@pytest.fixture
async def client(standby: Standby) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with (
        serving(SwitchableApp(standby)) as url,
        httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client,
    ):
        yield client


def headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in scope["headers"]}


async def test_requests_and_answers_are_forwarded_unchanged(holder: Holder, client: httpx.AsyncClient) -> None:
    headers = {"X-API-Key": "tml-alice", "Accept-Encoding": "zstd", "Connection": "x-secret", "X-Secret": "1"}
    answer = await client.request("PATCH", "/api/%2F%20a:b/echo?x=1&x=%26&", content=b"body", headers=headers)
    assert (answer.status_code, answer.content) == (418, b"body")
    assert answer.headers.get_list("x-one") == ["1", "2"]
    assert "x-hop" not in answer.headers and len(answer.headers.get_list("date")) == 1
    (scope,) = holder.scopes
    assert (scope["method"], scope["raw_path"], scope["query_string"]) == (
        "PATCH",
        b"/api/%2F%20a:b/echo",
        b"x=1&x=%26&",
    )
    assert headers_of(scope) == {
        "host": client.base_url.netloc.decode(),  # URLs in answers are for the client
        "accept": "*/*",
        "accept-encoding": "zstd",
        "user-agent": client.headers["user-agent"],
        "x-api-key": "tml-alice",
        "content-length": "4",
        "x-trainhouse-forwarded": "1",
    }


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "POST"])
async def test_a_request_without_a_body_is_forwarded_without_one(
    method: str, holder: Holder, client: httpx.AsyncClient
) -> None:
    answer = await client.request(method, "/echo")
    assert (answer.status_code, answer.content) == (418, b"")
    assert headers_of(holder.scopes[0]).get("content-length", "0") == "0"
    assert "transfer-encoding" not in headers_of(holder.scopes[0])


async def test_request_bodies_are_streamed_with_backpressure(holder: Holder, client: httpx.AsyncClient) -> None:
    """The standby buffers little if the holder stops reading."""
    num_sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for _ in range(1000):
            yield PIECE
            num_sent += 1

    asking = asyncio.create_task(client.post("/count", content=body()))
    await asyncio.wait_for(holder.heard.wait(), 30)
    await asyncio.sleep(0.5)
    assert 0 < num_sent < 300
    holder.may_continue.set()
    assert (await asking).json() == 1000 * len(PIECE)


async def test_answers_are_streamed(holder: Holder, client: httpx.AsyncClient) -> None:
    async with client.stream("GET", "/two_pieces") as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"first"
        holder.may_continue.set()
        assert [piece async for piece in pieces] == [b"second"]


async def test_a_disconnect_reaches_the_holder(holder: Holder, client: httpx.AsyncClient) -> None:
    asking = asyncio.create_task(client.post("/poll", content=b"{}"))
    await holder.heard.wait()
    asking.cancel()
    await asyncio.wait_for(holder.client_left.wait(), 30)
    holder.may_continue.set()
    assert (await client.post("/poll", content=b"{}")).content == b"done"


async def test_a_disconnect_within_the_body_reaches_the_holder(
    holder: Holder, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield PIECE
        await asyncio.sleep(60)

    asking = asyncio.create_task(client.post("/poll", content=body()))
    await wait_until(lambda: holder.scopes)
    asking.cancel()
    await asyncio.wait_for(holder.client_left.wait(), 30)
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


async def test_a_refusal_before_the_body_was_read_reaches_the_client(holder: Holder, client: httpx.AsyncClient) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield PIECE
        await wait_until(lambda: holder.scopes)
        yield PIECE

    assert (await client.post("/refuse", content=body())).status_code == 413


@pytest.mark.slow
async def test_many_polls_wait_at_once(holder: Holder, client: httpx.AsyncClient) -> None:
    asking = [asyncio.create_task(client.post("/poll", content=b"{}")) for _ in range(150)]
    await wait_until(lambda: len(holder.scopes) == 150)
    holder.may_continue.set()
    assert {(await one).content for one in asking} == {b"done"}


async def test_an_unreachable_holder_is_answered_503_with_retry_after(lease: Lease, client: httpx.AsyncClient) -> None:
    for url, reason in ((None, "no server holds the lease"), ("http://127.0.0.1:9", "127.0.0.1:9, did not respond")):
        lease.holder_url = url
        answer = await client.post("/api/v1/optim_step", json={})
        assert (answer.status_code, answer.headers["retry-after"], answer.headers["retry-after-ms"]) == (
            503,
            "1",
            "1000",
        )
        assert reason in answer.json()["detail"]
        refused = (await client.get("/v1/models")).json()
        assert reason in (refused["error"]["message"] if OPENAI else refused["detail"])


async def test_a_holder_that_dies_before_or_during_its_answer(lease: Lease, client: httpx.AsyncClient) -> None:
    """Before its answer, clients get 503; after the start of it, they see it cut off."""

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/half" in head:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(die, "127.0.0.1", 0) as dying:
        lease.holder_url = f"http://127.0.0.1:{dying.sockets[0].getsockname()[1]}"
        answer = await client.post("/poll", content=b"{}")
        assert answer.status_code == 503 and "did not respond (RemoteProtocolError" in answer.json()["detail"]
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/half")


async def test_the_certificate_of_the_holder_is_verified(
    lease: Lease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = certificates(tmp_path / "tls")
    standbys = [Standby(lease)]
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))
    standbys.append(Standby(lease))
    statuses = []
    async with serving(Holder(), files) as lease.holder_url:
        for standby in standbys:
            async with serving(standby) as url, httpx.AsyncClient() as client:
                statuses.append((await client.get(f"{url}/echo")).status_code)
            await standby.close()
    assert statuses == [503, 418]


async def test_requests_waiting_for_a_former_holder_are_answered_503(
    holder: Holder, lease: Lease, standby: Standby, client: httpx.AsyncClient
) -> None:
    asking = asyncio.create_task(client.post("/poll", content=b"{}"))
    await holder.heard.wait()
    standby.drop(keeps_present=True)
    await asyncio.sleep(0.1)
    assert not asking.done()
    lease.holder_url = "http://127.0.0.1:9"
    standby.drop(keeps_present=True)
    answer = await asyncio.wait_for(asking, 30)
    assert answer.status_code == 503 and "the holder changed" in answer.json()["detail"]
    await asyncio.wait_for(holder.client_left.wait(), 30)


async def test_a_stopping_standby_answers_503(holder: Holder, standby: Standby, client: httpx.AsyncClient) -> None:
    asking = [asyncio.create_task(client.post("/poll", content=b"{}")) for _ in range(3)]
    await wait_until(lambda: len(holder.scopes) == 3)
    standby.drop(keeps_present=False)
    assert [(await one).status_code for one in asking] == [503] * 3


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [("*", "", 400), ("/echo", "Host: another\r\n", 400), ("/echo?x=%ff&%", "", 418), ("/%00/../echo", "", 418)],
)
async def test_malformed_requests_are_answered_400_and_not_forwarded(
    holder: Holder, client: httpx.AsyncClient, target: str, headers: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(f"OPTIONS {target} HTTP/1.1\r\nHost: me\r\n{headers}Connection: close\r\n\r\n".encode())
    answer = (await asyncio.wait_for(reader.read(), 30)).decode()
    writer.close()
    assert answer.startswith(f"HTTP/1.1 {status} "), answer
    assert ("the request is malformed: " in answer) == (status == 400) == (holder.scopes == [])
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


async def test_forwarding_loops_are_detected(lease: Lease, client: httpx.AsyncClient) -> None:
    lease.holder_url = str(client.base_url)
    answer = await client.get("/api/v1/get_info")
    assert answer.status_code == 503 and "give each server its own --advertise-url" in answer.json()["detail"]


async def test_health_checks_are_not_forwarded(lease: Lease, client: httpx.AsyncClient) -> None:
    for holder_url, status in (("http://127.0.0.1:9", 200), (None, 503)):
        lease.holder_url = holder_url
        assert (await client.get("/api/v1/healthz")).json() == {"status": "ok"}
        readiness = await client.get("/api/v1/readyz")
        assert readiness.status_code == status
        assert readiness.json()["status"] == "standby" and readiness.json()["holder"] == holder_url


async def test_a_server_that_takes_over_answers_503_with_retry_after() -> None:
    async with serving(SwitchableApp(TakeoverApp())) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/api/v1/healthz")).status_code == 200
        readiness = await client.get("/api/v1/readyz")
        assert (readiness.status_code, readiness.json()["status"]) == (503, "taking over")
        answer = await client.post("/api/v1/optim_step", json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_an_expired_holder_only_answers_503(lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    lease.seconds = 60.0
    holder, tenure = Holder(), await lease.acquire()
    async with serving(LeaseGuard(holder, tenure)) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        assert (await client.post("/echo", content=b"x")).content == b"x"
        asking = [asyncio.create_task(client.get(path)) for path in ("/poll", "/two_pieces")]
        await wait_until(lambda: len(holder.scopes) == 3 and holder.heard.is_set())
        monkeypatch.setattr(leases, "boottime_seconds", lambda: math.inf)
        holder.may_continue.set()
        answer = await asking[0]
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "no longer holds the lease" in json.loads(answer.content)["detail"]
        with pytest.raises(httpx.RemoteProtocolError):
            await asking[1]
        assert (await client.post("/echo", content=b"x")).status_code == 503
        tenure._report_outage("gone away")
        for path, key in (("/echo", "detail"), ("/api/v1/readyz", "reason")):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert "because the server's database does not answer (gone away)" in answer.json()[key]
        assert answer.json()["status"] == "unavailable"


async def test_the_live_directory_of_a_holder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, store = Disk(monkeypatch), SqliteStore(tmp_path / "leases.db")
    lease = Lease(store, ["m"], "http://me", 60.0)
    await lease.prepare(tmp_path)
    tenure = await lease.acquire()
    assert not disk.has_synced(tmp_path / "live-0")
    assert disk.has_synced(tenure.take_live_state(tmp_path))
    store.close()

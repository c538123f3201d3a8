"""HTTP connections: how answers are written, in one piece or in several, and how long a client may take."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from trainhouse.server.routes import gate
from trainhouse.server.routes.gate import Exchange
from trainhouse.server.serving import connections
from trainhouse.server.serving.connections import HttpConnection

pytestmark = pytest.mark.anyio


def exchanging(app: ASGIApp) -> ASGIApp:
    """Returns the application with an exchange for each request, as the gate makes it."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        one = Exchange(scope, receive, send)
        await app(scope, one.receive, one.send)

    return serve


@pytest.fixture(autouse=True)
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CHECK_SECONDS", 0.02)


@exchanging
async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Serves the test paths; any path not listed answers with the first piece of the request body.

    /pieces: answers in three pieces with pauses between them.
    /early: answers before it reads the body.
    /late: reads the body after a while.
    /whole: reads the whole body.
    /long: answers with 64 MiB.
    """
    path = scope["path"]
    if path == "/late":
        await asyncio.sleep(3)
    message = {"body": b"early"} if path == "/early" else await receive()
    body = message["body"]
    while path in ("/late", "/whole") and message.get("more_body"):
        message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(64 if path == "/long" else 0):
        await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
    if path == "/pieces":
        for piece in (b"one", b"HTTP/1.1 two"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0.02)
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(served: ASGIApp = app, /, **options: int) -> AsyncIterator[uvicorn.Server]:
    listener = socket.create_server(("127.0.0.1", 0))
    connections.disconnect_stalled_clients(listener)
    config = uvicorn.Config(served, http=HttpConnection, lifespan="off", log_config=None, ws="none", **options)  # pyright: ignore
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0)
    try:
        yield server
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def connection_to(server: uvicorn.Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    (listener,) = server.servers[0].sockets
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()


@asynccontextmanager
async def connected(**options: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with serving(**options) as server, connection_to(server) as streams:
        yield streams


async def read(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(1 << 16), 30)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Reads until the server closes the connection, or resets it because more was sent than it would read."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := await read(reader):
            pieces.append(piece)
    return b"".join(pieces)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: here", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def test_head_and_body_arrive_together_on_a_reused_connection() -> None:
    async with connected() as (reader, writer):
        for body in (b"first", b"second", b""):
            writer.write(post("/", body))
            answer = await read(reader)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"0\r\n\r\n")
            assert body in answer


async def test_an_answer_in_pieces_is_sent_piece_by_piece() -> None:
    async with connected() as (reader, writer):
        writer.write(post("/pieces", b"three"))
        answer = await read(reader)
        assert b"one" in answer and b"two" not in answer
        while not answer.endswith(b"0\r\n\r\n"):
            answer += await read(reader)
        assert answer.endswith(b"3\r\none\r\nc\r\nHTTP/1.1 two\r\n5\r\nthree\r\n0\r\n\r\n")


async def test_an_answer_to_a_head_request_has_no_body() -> None:
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(b"HEAD / HTTP/1.1\r\nhost: here\r\n\r\n")
            answer = await read(reader)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\n")


async def test_expect_100_continue_is_answered_before_the_body() -> None:
    async with connected() as (reader, writer):
        head, body = post("/", b"body", "expect: 100-continue")[:-4], b"body"
        writer.write(head)
        assert await read(reader) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert b"body" in await read(reader)


async def test_a_request_that_is_not_http_is_refused() -> None:
    async with connected() as (reader, writer):
        writer.write(b"what is this\r\n\r\n")
        answer = await read(reader)
        assert answer.startswith(b"HTTP/1.1 400") and answer.endswith(b"Invalid HTTP request received.")
        assert await read(reader) == b""


async def test_a_request_that_arrives_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is slow in its head, in its body, or in a body that was answered before its end."""
    monkeypatch.setattr(connections, "ARRIVAL_SECONDS", 0.2)
    monkeypatch.setattr(connections, "BYTES_PER_SECOND", 10_000)
    for path, beginning in (("/whole", 30), ("/whole", -100), ("/early", -100)):
        async with connected() as (reader, writer):
            request = post(path, b"b" * 1000)
            writer.write(request[:beginning])
            dripping = asyncio.create_task(drip(writer))
            answer = await read_all(reader)
            dripping.cancel()
            assert (b" 408 Request Timeout" in answer) == (path == "/whole"), answer
            assert (b"early" in answer) == (path == "/early"), "only one answer"
            assert answer.count(b"HTTP/1.1") == 1


async def drip(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.05)


async def test_a_slow_but_steady_request_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ARRIVAL_SECONDS", 0.1)
    monkeypatch.setattr(connections, "BYTES_PER_SECOND", 100)
    async with connected() as (reader, writer):
        request = post("/whole", b"b" * 1000)
        for piece in (request[:500], request[500:]):
            writer.write(piece)
            await asyncio.sleep(0.3)  # 500 bytes are worth five seconds
        assert (await read(reader)).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_request_that_the_server_does_not_read_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ARRIVAL_SECONDS", 2.0)
    monkeypatch.setattr(connections, "BYTES_PER_SECOND", 1 << 30)
    async with connected() as (reader, writer):
        writer.write(post("/late", b"b" * (1 << 20)))
        answer = await read(reader)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer


async def test_a_request_without_a_body_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ARRIVAL_SECONDS", 0.1)
    async with connected() as (reader, writer):
        writer.write(b"GET /late HTTP/1.1\r\nhost: here\r\n\r\n")
        assert (await read(reader)).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_client_that_is_still_sending_receives_the_whole_answer() -> None:
    async with serving(sized_early_app) as server, connection_to(server) as (reader, writer):
        request = post("/", bytes(1 << 16))
        writer.write(request[:-1])
        assert (await read(reader)).endswith(b"\r\n\r\nearly")
        writer.write(request[-1:] + request)
        assert (await read(reader)).endswith(b"\r\n\r\nearly"), "the connection is kept"


@exchanging
async def sized_early_app(scope: Scope, receive: Receive, send: Send) -> None:
    await Response("early")(scope, receive, send)


async def test_an_idle_connection_is_closed() -> None:
    async with connected(timeout_keep_alive=1) as (reader, _):
        assert await asyncio.wait_for(reader.read(), 30) == b""


async def test_the_head_of_a_request_has_a_size_limit() -> None:
    async with connected() as (reader, writer):
        within = b"GET / HTTP/1.1\r\nx: " + b"b" * (connections.MAX_HEAD_BYTES - 100)
        writer.write(within)
        await asyncio.sleep(0.05)
        writer.write(b"\r\n\r\n")
        assert (await read(reader)).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.write(within + b"b" * 100)
        answer = await asyncio.wait_for(reader.read(), 30)
        assert answer.startswith(b"HTTP/1.1 431 ") and b"more than 65536 bytes" in answer


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="TCP_USER_TIMEOUT exists only on Linux")
async def test_a_client_that_reads_nothing_of_its_answer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED_SECONDS", 0.5)
    async with serving() as server, connection_to(server) as (_, writer):
        writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
        writer.write(b"GET /long HTTP/1.1\r\nhost: here\r\n\r\n")
        await asyncio.sleep(0.2)
        assert server.server_state.connections
        async with asyncio.timeout(30):
            while server.server_state.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def test_a_request_that_begins_before_the_previous_answer_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The body must not be dropped as the rest of the request that was answered."""
    monkeypatch.setattr(gate, "DRAIN_SECONDS", 0.1)
    async with connected() as (reader, writer):
        second = post("/whole", b"second")
        for end in (20, -3):
            writer.write(post("/", b"first") + second[:end])
            assert b"first" in await read(reader)
            await asyncio.sleep(0.3)
            writer.write(second[end:])
            assert (await read(reader)).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_request_is_not_given_up_while_the_one_before_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ARRIVAL_SECONDS", 1.0)
    async with connected() as (reader, writer):
        second = post("/whole", b"second")
        writer.write(post("/late", b"first") + second[: -len("second")])
        assert (await read(reader)).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.write(b"second")
        assert (await read(reader)).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_the_unread_rest_of_an_answered_request_is_dropped_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "DRAIN_BYTES", 1 << 20)
    async with connected() as (reader, writer):
        for num_bytes in (1 << 19, 1 << 17):
            writer.write(post("/early", bytes(num_bytes)))
            assert b"early" in await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 30)
        writer.write(post("/early", bytes(1 << 22)))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        assert (await read_all(reader)).count(b"HTTP/1.1") == 1
        assert reader.at_eof() or writer.is_closing()


async def test_a_connection_idles_longer_than_a_request_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is ready at once ends before the connection looks at the head again."""
    monkeypatch.setattr(connections, "ARRIVAL_SECONDS", 0.1)
    async with connected() as (reader, writer):
        for body in (b"alpha", b"omega"):
            writer.write(post("/", body))
            assert body in await read(reader)
            await asyncio.sleep(0.3)


async def test_a_head_behind_an_unfinished_answer_is_not_read_without_limit() -> None:
    """A client that reads nothing, and sends headers without an end, must not fill the server's memory."""
    async with connected() as (_, writer):
        writer.write(b"GET /long HTTP/1.1\r\nhost: here\r\n\r\nGET / HTTP/1.1\r\n")
        lines = b"x: " + bytes([120]) * 1000 + b"\r\n"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                for _ in range(50_000):
                    writer.write(lines)
                    await writer.drain()
        writer.transport.abort()


async def test_a_request_behind_a_long_answer_is_answered_though_it_is_large() -> None:
    async with connected() as (reader, writer):
        body = bytes(1 << 20)
        writer.write(b"GET /long HTTP/1.1\r\nhost: here\r\n\r\n" + post("/whole", body))
        num_answers = 0
        while num_answers < 2:
            piece = await read(reader)
            assert piece
            num_answers += piece.count(b"HTTP/1.1 200 OK")


async def test_the_rest_of_an_answered_request_is_limited_in_trailers_too() -> None:
    async with connected() as (reader, writer):
        writer.write(b"POST /early HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
        assert b"early" in await read(reader)
        lines, num_sent = b"x: " + bytes([120]) * 1000 + b"\r\n", 0
        with contextlib.suppress(ConnectionError):
            while num_sent < 4 * gate.DRAIN_BYTES:
                writer.write(lines * 64)
                await writer.drain()
                num_sent += 64 * len(lines)
        assert num_sent < 4 * gate.DRAIN_BYTES


async def test_the_trailers_of_a_request_have_a_size_limit() -> None:
    async with connected() as (_, writer):
        writer.write(b"POST /whole HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
        lines, num_sent = b"x: " + bytes([120]) * 1000 + b"\r\n", 0
        with contextlib.suppress(ConnectionError):
            while num_sent < 64 << 20:
                writer.write(lines * 64)
                await writer.drain()
                num_sent += 64 * len(lines)
        assert num_sent < 64 << 20


async def test_what_is_between_the_pieces_of_a_body_is_no_trailer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_HEAD_BYTES", 20)
    async with connected() as (reader, writer):
        writer.write(b"POST /whole HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in [b"1\r\n", b"x\r\n"] * 20 + [b"0\r\n\r\n"]:
            await asyncio.sleep(0.002)
            writer.write(piece)
        assert (await read(reader)).startswith(b"HTTP/1.1 200 OK\r\n")

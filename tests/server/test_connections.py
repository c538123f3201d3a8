"""Answers as they leave a connection: in one piece, and still whole where they are not."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from trainhouse.server.connections import Connection

pytestmark = pytest.mark.anyio


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """/pieces answers in three, with time between them; everything else with the body it got."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/pieces":
        for piece in (b"one", b"HTTP/1.1 two"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0.02)
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_config=None, ws="none"))
    serving = asyncio.create_task(server.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def read(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(1 << 16), 5)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: here", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def test_head_and_body_arrive_together_again_and_again() -> None:
    async with connected() as (reader, writer):
        for body in (b"first", b"second", b""):
            writer.write(post("/", body))
            answer = await read(reader)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"0\r\n\r\n")
            assert body in answer


async def test_an_answer_in_pieces_arrives_as_they_come() -> None:
    async with connected() as (reader, writer):
        writer.write(post("/pieces", b"three"))
        answer = await read(reader)
        assert b"one" in answer and b"two" not in answer
        while not answer.endswith(b"0\r\n\r\n"):
            answer += await read(reader)
        assert answer.endswith(b"3\r\none\r\nc\r\nHTTP/1.1 two\r\n5\r\nthree\r\n0\r\n\r\n")


async def test_an_answer_to_head_arrives_without_a_body() -> None:
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(b"HEAD / HTTP/1.1\r\nhost: here\r\n\r\n")
            answer = await read(reader)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\n")


async def test_a_client_that_asks_whether_to_go_on_is_told_so_before_the_answer() -> None:
    async with connected() as (reader, writer):
        head, body = post("/", b"body", "expect: 100-continue")[:-4], b"body"
        writer.write(head)
        assert await read(reader) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert b"body" in await read(reader)


async def test_what_is_no_http_is_refused() -> None:
    async with connected() as (reader, writer):
        writer.write(b"what is this\r\n\r\n")
        answer = await read(reader)
        assert answer.startswith(b"HTTP/1.1 400") and answer.endswith(b"Invalid HTTP request received.")
        assert await read(reader) == b""

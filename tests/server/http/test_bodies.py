"""Limits on request bodies: size as received, size decompressed, and nesting."""

import json

import pytest
import zstandard

from ..api import OPENAI
from ..real import ALICE, PROTOBUF, Server, datum

pytestmark = pytest.mark.anyio

JSON_ROUTES = ("create_session", "optim_step", "forward_backward", "asample")

MAX_BODY_BYTES, MAX_DECOMPRESSED_BYTES = 200_000, 1_000_000
"""The limits in `server_config`."""

_POLL = {"target": {"sampling_session_id": "none"}, "timeout": 0}


@pytest.mark.parametrize(("num_beyond", "status"), [(0, 200), (1, 413)])
@pytest.mark.parametrize("in_pieces", [False, True])
async def test_the_limit_holds_for_bodies_as_received(
    server: Server, num_beyond: int, status: int, in_pieces: bool
) -> None:
    """The limit holds with and without Content-Length, and where FastAPI reads the body as well as where we do."""
    for route, content in (("create_session", {"sdk_version": "s"}), ("retrieve_futures", _POLL)):
        body = json.dumps(content).encode()
        body += b" " * (MAX_BODY_BYTES + num_beyond - len(body))

        async def pieces(whole: bytes = body):
            yield whole[:7]
            yield whole[7:]

        headers = {"Content-Type": "application/json"}
        sent = pieces() if in_pieces else body
        answer = await server.clients[ALICE].post(route, content=sent, headers=headers)
        found = 200 if route == "retrieve_futures" and answer.status_code == 404 else answer.status_code
        assert found == status, (route, answer.text)


@pytest.mark.parametrize(("num_beyond", "status"), [(0, 400), (1, 413)])
@pytest.mark.parametrize("is_declared", [False, True])
async def test_the_limit_holds_for_decompressed_bodies(
    server: Server, num_beyond: int, status: int, is_declared: bool
) -> None:
    run = await server.create_run()
    compressor = zstandard.ZstdCompressor(write_content_size=is_declared)
    frame = compressor.compress(bytes(MAX_DECOMPRESSED_BYTES + num_beyond))
    answer = await run.send(frame, **{"Content-Encoding": "zstd"})
    assert answer.status_code == status, answer.text
    assert ("1000000" in answer.text) == (status == 413)


async def test_nested_compression_is_decompressed_only_once(server: Server) -> None:
    run = await server.create_run()
    whole = run.encode([datum([5, 6, 7])], 1)
    once = zstandard.compress(whole)
    refused = await run.send(zstandard.compress(once), **{"Content-Encoding": "zstd"})
    assert refused.status_code == 400 and "not a valid protobuf" in refused.json()["detail"]
    assert (await run.send(once, **{"Content-Encoding": "zstd, zstd"})).status_code == 415


@pytest.mark.parametrize("depth", [100, 1_000, 60_000])
@pytest.mark.parametrize("route", [*JSON_ROUTES, *(["/v1/completions"] if OPENAI else ())])
async def test_deeply_nested_json_is_refused(server: Server, route: str, depth: int) -> None:
    nested = b'{"tags": ' + b"[" * depth + b"]" * depth + b', "data": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
    url = f"http://test{route}" if route.startswith("/") else route
    answer = await server.clients[ALICE].post(url, content=nested, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 413), answer.text[:200]
    assert len(answer.content) < 1000


async def test_deeply_nested_protobuf_is_refused(server: Server) -> None:
    run = await server.create_run()
    nested = b""
    for _ in range(300):
        nested = b"\x1b" + nested + b"\x1c"  # unknown groups, which any message may contain
    refused = await run.send(nested, **{"Content-Type": PROTOBUF})
    assert refused.status_code == 400 and "not a valid protobuf" in refused.json()["detail"]

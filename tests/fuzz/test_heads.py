"""Heads of requests of any bytes: every route answers, and none with an internal error."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import unquote

import pytest
from fastapi import FastAPI
from trainhouse.server.tenants.auth import create_key
from trainhouse.server.tenants.rate_limits import UnauthenticatedLimits
from trainhouse.server.tenants.scopes import ROUTE_SCOPES, SCOPES

from ..server.console.signed_in import new_browser, sign_in
from ..server.console.test_places import OPEN_PAGES as CONSOLE_PAGES
from ..server.real import MODEL, running_server, server_config, started_dispatch
from ..server.serving.test_connections import connection_to, read_all, serving
from ..server.tenants.test_isolation import OPEN_PAGES
from ..server.tenants.test_revocation import new_run
from .effort import MANY
from .extremes import ENCODINGS, HEADER_VALUES, HEADERS, IN_ADDRESSES, TYPES

pytestmark = pytest.mark.anyio


@pytest.fixture
async def app(tiny_models: dict[str, Path], tmp_path: Path, anyio_backend: str) -> AsyncIterator[FastAPI]:
    config = server_config(tiny_models["qwen3"], tmp_path)
    async with started_dispatch(config) as dispatch, running_server(config, dispatch) as server:
        yield server.app


_INPUTS_WITH_SAME_KEYS = 100
NAMES = (
    *HEADERS,
    *("Host", "Origin", "Cookie", "Referer", "Accept", "Accept-Encoding", "Authorization", "X-API-Key", "X-Form-Token"),
    *("Range", "If-Range", "If-None-Match", "If-Modified-Since", "Last-Event-ID", "Sec-Fetch-Site", "Content-Length"),
    *("Content-Type", "Content-Encoding", "Transfer-Encoding", "Traceparent", "Tracestate", "Expect", "Forwarded"),
    *("X-Forwarded-Host", "X-Forwarded-Proto", "Upgrade", "Connection", "X-HTTP-Method-Override"),
)
VALUES: tuple[bytes, ...] = (
    *(one if isinstance(one, bytes) else one.encode() for one in (*HEADER_VALUES, *TYPES, *ENCODINGS)),
    *(
        b"http://[",
        b"http://[::1",
        b"[",
        b"]",
        b"//",
        b"http://\xe2\x84\x80",
        b"http://a:99999999",
        b"http://a:x",
        b"null",
    ),
    *(
        b"a:b:c",
        b"@",
        b"a@b",
        b"?",
        b"#",
        b"\\",
        b" ",
        b"\t",
        b"\x7f",
        b"%",
        b"%zz",
        b"%ff",
        b"\xc2\xb2",
        b"a:\xc2\xb2",
    ),
    *(b"bytes=", b"bytes=-", b"bytes=0-", b"bytes=5-2", b"bytes=a-b", b"bytes=0-0,1-1,-1", b"bytes=" + b"0-," * 3000),
    *(b"bytes=" + b"9" * 400 + b"-", b"bytes=-" + b"9" * 5000, b"items=0-1", b"Bearer", b"Bearer ", b"Basic \xff"),
    *(
        b"Bearer a.b.c",
        b"Bearer a.b.c.d",
        b"Bearer ." * 1000,
        b"Bearer \xed\xa0\x80.",
        b"tml-",
        b"tml-\xff",
        b"tml-\x00",
    ),
    *(b"a=b; a", b"=", b";" * 5000, b"a=" + b"b" * 4000, b'a="\\', b'a="\\777"', b"trainhouse_console=", b"a=\xff"),
    *(b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"00-" + b"f" * 32 + b"-zz-01", b"-1_-1.", b"1_1", b"1" * 400),
    *(b"1", b"0", b"-1", b"1e9", b"Thu, 99 Foo 99999 99:99:99 GMT", b"text/html", b"text/html;q=" + b"9" * 400, b"*/*"),
    *(b"none", b"same-origin", b"cross-site", b"chunked", b"100-continue", b"websocket"),
)
QUERIES: tuple[bytes, ...] = (
    *(
        b"",
        b"&" * 20_000,
        b"a&" * 3000,
        b"a=%ff&b=%00",
        b"\xff\xfe",
        b"\xe2\x82\xac=1",
        b"=" * 100,
        b"run=" + b"a" * 300,
    ),
    *(b"run=a&" * 50, b"search=%", b"search=%25_%5c", b"search=" + b"a" * 300, b"search=%ed%a0%80", b"search=%00"),
    *(b"page=0", b"page=-1", b"page=1e9", b"page=" + b"9" * 5000, b"page=999999", b"limit=" + b"9" * 5000, b"limit=-1"),
    *(b"offset=2147483647", b"offset=99999999999999999999", b"before=9007199254740993", b"before=-1", b"before=1"),
    *(b"after=" + b"9" * 30, b"points=0", b"points=1", b"names=", b"names=" + b"a" * 200, b"names=a&" * 200),
    *(b"since=1_1", b"since=" + b"9" * 30 + b"_1", b"state=x", b"next=http://[", b"next=//[", b"next=/console/\x00"),
    *(b"next=%0d%0aX:%20y", b"expires=1&signature=a", b"expires=" + b"9" * 5000 + b"&signature=%ff", b"failed=maybe"),
    *(
        b"config_bytes=2",
        b"config_bytes=-1",
        b"config_bytes=1e3",
        b"model=%00",
        b"model=" + b"a" * 5000,
        b"ttl_seconds=x",
    ),
    *(b"project_id=%00", b"access_scope=all", b"base_model=%ff&config_bytes=2"),
)
FORMS: tuple[bytes, ...] = (
    *(b"", b"key=a", b"key=tml-a&next=/console/runs", b"&" * 5000, b"a=1&" * 9, b"a=1&" * 9 + b"key=tml-a"),
    *(
        b"key=\xff",
        b"key=%ff%00",
        b"key=%ed%a0%80",
        b"key=tml-%00",
        b"key=tml-a&next=http://[",
        b"key=" + b"a" * 15_000,
    ),
    *(
        b"key=" + b"a" * 20_000,
        b"%",
        b"=",
        b"key",
        b"key=tml-a&key=tml-b",
        b"\x00",
        b"{}",
        b"[]",
        b"null",
        b"\xff" * 100,
    ),
    *(b"key=tml-a&next=%0d%0aSet-Cookie:%20a", b"--a\r\nContent-Disposition: form-data; name=key\r\n\r\nb\r\n--a--"),
)
PIECES = tuple(one.encode() for one in (*IN_ADDRESSES, "[", "]", "{", "\\", "//", "..;", "%5b", "\x7f"))

METHODS = (b"GET", b"POST", b"OPTIONS", b"CONNECT", b"PRI", b"get", b"TRACE", b"\xff", b"A" * 300)
TARGETS: tuple[bytes, ...] = (
    *(
        b"/",
        b"*",
        b"//",
        b"/api/v1/limits",
        b"/console",
        b"/console/sign-in",
        b"http://[/",
        b"http://a/console",
        b"//[/",
    ),
    *(
        b"/console/runs",
        b"a:80",
        b"",
        b"/%",
        b"/\xff",
        b"/openapi.json",
        b"/docs/..%2f",
        b"/console/static/a/../b",
        b"?a",
    ),
    *(
        b"/api/v1/readyz",
        b"/api/v1/healthz;",
        b"http://a:b@c/",
        b"#",
        b"/a b",
        b"/\x00",
        b"https://a:99999999/",
        b"/nothing",
    ),
)


class Heads:
    """Draws requests to every route, most of them almost right."""

    def __init__(
        self, routes: Sequence[tuple[str, str]], keys: Sequence[bytes], cookie: bytes, names: Sequence[bytes], seed: int
    ) -> None:
        self._random = random.Random(seed)
        self._routes, self._keys, self._cookie, self._names = routes, keys, cookie, names

    def next(self) -> tuple[dict, bytes]:
        """Returns an ASGI scope and a body."""
        draw = self._random
        method, template = draw.choice(self._routes)
        path = b"/".join(self._piece(piece) for piece in template.split("/"))
        if draw.randrange(30) == 0:
            path += draw.choice(PIECES)
        headers = [(b"host", b"localhost:8000")]
        if draw.randrange(3):
            headers.append((b"x-api-key", draw.choice(self._keys)))
        if draw.randrange(2):
            headers.append((b"cookie", self._cookie))
        for _ in range(draw.choice([0, 1, 1, 2, 3])):
            name, value = draw.choice(NAMES).lower().encode(), draw.choice(VALUES)
            headers = [one for one in headers if one[0] != name or draw.randrange(4) == 0]
            headers.append((name, value))
        body = draw.choice(FORMS) if draw.randrange(2) else b""
        query = draw.choice(QUERIES) if draw.randrange(2) else b""
        return _scope(method, path, query, headers), body

    def _piece(self, piece: str) -> bytes:
        if not piece.startswith("{"):
            return piece.encode()
        return self._random.choice([*self._names, b"weights", self._random.choice(PIECES)])


def _scope(method: str, path: bytes, query: bytes, headers: Sequence[tuple[bytes, bytes]]) -> dict:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50_000),
        "scheme": "http",
        "method": method,
        "root_path": "",
        # As uvicorn decodes it.
        "path": unquote(path.decode("ascii", "replace")),
        "raw_path": path,
        "query_string": query,
        "headers": list(headers),
        "state": {},
    }


async def answer(app: FastAPI, scope: dict, body: bytes) -> int:
    """Returns the status. Raises what the application raises."""
    messages: list[dict] = [{"type": "http.request", "body": body, "more_body": False}]
    statuses = []

    async def receive() -> dict:
        if messages:
            return messages.pop()
        await asyncio.sleep(0.2)
        return {"type": "http.disconnect"}

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
            for name, value in message["headers"]:
                assert b"\n" not in name + value and b"\r" not in name + value, message

    async with asyncio.timeout(60):
        await app(scope, receive, send)
    return statuses[0]


async def _heads(app: FastAPI, seed: int) -> Heads:
    """Returns heads with keys and a cookie that are still valid: requests revoke them."""
    services = app.state.services
    keys = [await create_key(services.store, name, SCOPES) for name in ("alice", "bob")]
    async with new_browser(app, "http://localhost:8000") as client:
        await sign_in(client, keys[0])
        cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items()).encode()
    routes = [(method, path) for route in ROUTE_SCOPES for method, path in [route.split(" ")]]
    routes += [("GET", path) for path in (*OPEN_PAGES, *CONSOLE_PAGES, "/api/v1/healthz", "/api/v1/readyz")]
    routes += [("POST", "/console/sign-in"), ("POST", "/console/sign-out")] * 2
    run = await new_run(services, await services.auth.authenticate(keys[0]))
    names = [run.run_id.encode(), run.session_id.encode(), b"n", b"1", MODEL.encode()]
    return Heads(routes, [b"tml-made-up", *(key.encode() for key in keys)], cookie, names, seed)


async def _send(app: FastAPI, num_inputs: int, seed: int) -> None:
    app.state.services.auth.unauthenticated_limits = UnauthenticatedLimits(10**9)
    statuses, failures = Counter[int](), []
    for number in range(num_inputs):
        if number % _INPUTS_WITH_SAME_KEYS == 0:
            heads = await _heads(app, seed + number)
        scope, body = heads.next()  # pyright: ignore[reportPossiblyUnbound]
        shown = f"{scope['method']} {scope['path']!r} ? {scope['query_string'][:80]!r} {scope['headers']} {body[:80]!r}"
        try:
            status = await answer(app, scope, body)
        except Exception as error:
            logging.exception("%s", shown)
            status, shown = 500, f"{error!r}: {shown}"
        statuses[status] += 1
        if status >= 500:
            failures.append(f"{status} {shown}")
    assert not failures, f"seed {seed}\n" + "\n".join(failures[:50])
    print(f"{num_inputs} heads: {dict(statuses)}")


async def test_no_head_or_form_is_an_internal_error(app: FastAPI) -> None:
    await _send(app, 1500, 1)


@pytest.mark.full
async def test_no_head_or_form_is_an_internal_error_in_the_long_run(app: FastAPI) -> None:
    await _send(app, 20 * MANY, random.randrange(1 << 32))


@pytest.mark.parametrize("num_inputs", [200, pytest.param(MANY, marks=pytest.mark.full)])
async def test_no_bytes_on_a_connection_are_an_internal_error(
    app: FastAPI, caplog: pytest.LogCaptureFixture, num_inputs: int
) -> None:
    """Request lines and heads that no client sends, up to what the parser of HTTP takes."""
    draw, names = random.Random(num_inputs if num_inputs == 200 else None), [name.encode() for name in NAMES]
    async with serving(app) as server:
        for _ in range(num_inputs):
            method = draw.choice(
                [b"GET", b"POST", b"OPTIONS", b"CONNECT", b"PRI", b"get", b"TRACE", b"\xff", b"A" * 300]
            )
            target = draw.choice(TARGETS) + draw.choice([b"", b"?" + draw.choice(QUERIES), draw.choice(PIECES)])
            headers = [
                names[draw.randrange(len(names))] + b": " + draw.choice(VALUES) for _ in range(draw.randrange(4))
            ]
            version = draw.choice([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b""])
            head = b"\r\n".join([b" ".join([method, target, version]), b"Connection: close", *headers, b"", b""])
            async with connection_to(server) as (reader, writer):
                writer.write(head)
                writer.write_eof()
                answer = await asyncio.wait_for(read_all(reader), 30)
            assert not answer.startswith(b"HTTP/1.1 5"), (head, answer)
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert not errors, errors[0].getMessage()

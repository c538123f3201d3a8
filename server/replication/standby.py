"""ASGI applications of a server that shares its database: a standby forwards all requests to the lease's holder.

Requests and responses are streamed piece by piece; if the client disconnects, so does the standby. `SwitchableApp`
receives requests for as long as the process lives, and `LeaseGuard` serves them while this server holds the lease.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from typing import Literal

import httpx
from fastapi import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...schemas.errors import RequestError
from ...schemas.models import Health, Readiness
from ..http.errors import error_response
from ..routes.gate import Exchange
from .leases import Lease, Tenure

logger = logging.getLogger(__name__)

_HEALTH, _READINESS = "/api/v1/healthz", "/api/v1/readyz"
_CONNECT_SECONDS = 5.0
_IDLE_SECONDS = 30.0
"""Shorter than a server's keep-alive, so that a connection it is about to close is not reused."""
_MAX_IDLE = 32
"""Kept small, because httpx compares every idle connection with all others at each request."""
_RETRY_SECONDS = 1.0
_FORWARDED = "x-trainhouse-forwarded"
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


class SwitchableApp:
    """An ASGI application that delegates to `target`, which may change at any time; answers health checks itself."""

    def __init__(self, target: ASGIApp) -> None:
        self.target = target

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == _HEALTH:
            await JSONResponse(Health().model_dump())(scope, receive, send)
        else:
            await self.target(scope, receive, send)


class LeaseGuard:
    """The application of the lease's holder: sends a response only while the lease is certainly held."""

    def __init__(self, app: ASGIApp, tenure: Tenure) -> None:
        self._app = app
        self._tenure = tenure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = is_cut = False

        async def send_in_time(message: Message) -> None:
            nonlocal has_begun, is_cut
            if is_cut:
                return
            if self._tenure.is_valid:
                has_begun = True
                await send(message)
                return
            is_cut = True
            if has_begun:
                return
            reason = "this server no longer holds the lease"
            if (cause := self._tenure.renewal_error) is not None:
                reason = f"{reason}, because {cause}"
            if scope["path"] == _READINESS:
                await _readiness("unavailable", None, reason)(scope, receive, send)
            else:
                await _unavailable(scope, receive, send, reason)

        await self._app(scope, receive, send_in_time)


class TakeoverApp:
    """Answers 503 while the server holds the lease, but has not recovered the state yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == _READINESS:
            await _readiness("taking over", None)(scope, receive, send)
        else:
            reason, exchange = "this server is taking over from another one", Exchange(scope, receive, send)
            await _unavailable(scope, exchange.receive, exchange.send, reason)


class Standby:
    """Forwards requests to the lease's holder. Must be closed."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_keepalive_connections=_MAX_IDLE, keepalive_expiry=_IDLE_SECONDS),
            verify=ssl.create_default_context(),
            trust_env=False,  # other servers are reached directly, not through proxies
        )
        # Requests being forwarded, with the URL of the holder that they wait for.
        self._forwarding: dict[asyncio.Task[None], str] = {}

    async def close(self) -> None:
        await self.client.aclose()

    def drop(self, keeps_present: bool) -> None:
        """Drops requests being forwarded.

        Args:
            keeps_present: those to the present holder stay; a former one may never respond.
        """
        for forwarding, url in self._forwarding.items():
            if not keeps_present or url != self._lease.holder_url:
                forwarding.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        holder, exchange = self._lease.holder_url, Exchange(scope, receive, send)
        receive, send = exchange.receive, exchange.send
        if scope["path"] == _READINESS:
            await _readiness("standby", holder)(scope, receive, send)
        elif holder is None:
            await _unavailable(scope, receive, send, "no server holds the lease at the moment")
        elif any(name == _FORWARDED.encode() for name, _ in scope["headers"]):
            await _unavailable(
                scope,
                receive,
                send,
                f"a standby mistook this server for the holder, {holder}: give each server its own --advertise-url",
            )
        else:
            await _ForwardedRequest(self, holder, scope, receive, send).run()

    def register(self, forwarding: "asyncio.Task[None]", url: str) -> None:
        self._forwarding[forwarding] = url
        forwarding.add_done_callback(self._forwarding.pop)


class _ForwardedRequest:
    """Forwards one request and its response."""

    def __init__(self, standby: Standby, url: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._standby = standby
        self._url = url
        self._scope, self._receive, self._send = scope, receive, send
        self._has_body = asyncio.Event()
        self._has_begun = False

    async def run(self) -> None:
        """Runs until the response is sent, the client disconnects, or the holder changes."""
        answering, leaving = asyncio.create_task(self._answer()), asyncio.create_task(self._client_leaves())
        self._standby.register(answering, self._url)
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            has_left = leaving.done()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.wait({answering, leaving})
        if answering.cancelled() and not has_left:
            await self._fail("the holder changed, or this server stops")
        elif not answering.cancelled() and (error := answering.exception()) is not None:
            await self._failed(error)

    async def _answer(self) -> None:
        response = await self._standby.client.send(self._request(), stream=True)
        async with contextlib.aclosing(response):
            headers = [(name.lower(), value) for name, value in response.headers.raw]
            # uvicorn adds its own date header.
            passed = [(name, value) for name, value in _end_to_end(headers) if name != b"date"]
            self._has_begun = True
            await self._send({"type": "http.response.start", "status": response.status_code, "headers": passed})
            async for piece in response.aiter_raw():
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await self._send({"type": "http.response.body"})

    def _request(self) -> httpx.Request:
        path, query = self._scope["raw_path"], self._scope["query_string"]
        target = httpx.URL(self._url).copy_with(raw_path=path + (b"?" + query if query else b""))
        headers = [*_end_to_end(self._scope["headers"]), (_FORWARDED.encode(), b"1")]
        names = {name for name, _ in self._scope["headers"]}
        has_body = bool(names & {b"content-length", b"transfer-encoding"})
        if not has_body:
            self._has_body.set()
        return httpx.Request(self._scope["method"], target, headers=headers, content=self._body() if has_body else None)

    async def _body(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise httpx.ReadError("the client disconnected before its request was complete")
            yield message.get("body", b"")
            more = message.get("more_body", False)
        self._has_body.set()

    async def _client_leaves(self) -> None:
        await self._has_body.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _failed(self, error: BaseException) -> None:
        if isinstance(error, httpx.InvalidURL | httpx.LocalProtocolError) and not self._has_begun:
            # uvicorn accepts requests that httpx cannot send, such as `OPTIONS *` or two Host headers.
            await _refuse(self._scope, self._receive, self._send, RequestError(f"the request is malformed: {error}"))
        elif isinstance(error, httpx.TransportError):
            await self._fail(f"{type(error).__name__} {error}".strip())
        else:
            raise error

    async def _fail(self, reason: str) -> None:
        """Answers 503; if the response has begun, it is left incomplete, and uvicorn closes the connection."""
        words = f"the server that holds the lease, {self._url}, did not respond ({reason})"
        logger.info("%s %s: %s", self._scope["method"], self._scope["path"], words)
        if not self._has_begun:
            await _unavailable(self._scope, self._receive, self._send, words)


def _end_to_end(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns the headers without hop-by-hop ones. Names must be in lower case."""
    named = b",".join(value for name, value in headers if name == b"connection").lower().split(b",")
    dropped = _HOP_BY_HOP.union(name.strip() for name in named)
    return [(name, value) for name, value in headers if name not in dropped]


def _readiness(
    status: Literal["standby", "taking over", "unavailable"], holder: str | None, reason: str | None = None
) -> JSONResponse:
    answer = Readiness(status=status, base_models={}, holder=holder, reason=reason)
    return JSONResponse(answer.model_dump(), 503 if holder is None else 200)


async def _unavailable(scope: Scope, receive: Receive, send: Send, reason: str) -> None:
    """Answers 503, on which clients retry."""
    await _refuse(scope, receive, send, RequestError(f"{reason}: send this again", 503, _RETRY_SECONDS))


async def _refuse(scope: Scope, receive: Receive, send: Send, error: RequestError) -> None:
    await (await error_response(Request(scope), error))(scope, receive, send)

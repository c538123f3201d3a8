"""Gate: checks a request before its body is read, and calls the routes. Exchange: one request and its answer.

The routes that clients call for every operation are called directly: FastAPI takes longer to resolve their dependencies
than they take to run. They stay registered with FastAPI for the OpenAPI document and for any request other than a plain
POST.

If a request is answered before it has arrived, up to DRAIN_BYTES of the rest are read and dropped for at most
DRAIN_SECONDS: a client that is still sending receives the answer, and one that never stops is disconnected. The end of
an answer without Content-Length waits for that.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence

from fastapi import APIRouter, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...schemas.adapters.model_files import is_loopback
from ...schemas.errors import RequestError, UnknownField
from ...schemas.training import describe_unknown
from ...workers.protocol.plugins import plugin_rows
from ..config.server_config import ServerConfig
from ..http.bodies import Body, BodyTooLarge, body_limits
from ..http.errors import HANDLED_ERRORS, handle_error
from ..tenants.auth import Auth, Tenant, address_of
from ..tenants.scopes import LARGE_BODIES, ROUTE_SCOPES
from .services import Services

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request, Services, Tenant], Awaitable[Response]]

DRAIN_BYTES = 4 << 20
DRAIN_SECONDS = 5.0

_NOTE = b"x-deprecation-note"
"""A header that SDKs log."""
_TRACE_ID = b"x-trace-id"
_MOST_IGNORED = 256
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::[^.@:]*)?", re.DOTALL)
_OF_PROXIES = frozenset({"via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip", "cdn-loop"})

_PATTERNS: tuple[tuple[str, re.Pattern[str], str], ...] = tuple(
    (method, compile_path(path)[0], route) for route in ROUTE_SCOPES for method, path in [route.split(" ")]
)


class Exchange:
    """One request and its answer, as the application receives and sends them.

    The key of an admitted request is confirmed when its body has arrived, before its answer, and before each piece of
    a stream: if it was revoked meanwhile, the answer is 401, and a stream ends.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        self.request = Request(scope)
        self.body = Body()
        self.headers: list[tuple[bytes, bytes]] = []
        """Added to those of the answer."""
        self.status: int | None = None
        """Status of the answer; None until it begins."""
        self.auth: Auth | None = None
        """Confirms the key from when the request is admitted."""
        self._receive, self._send = receive, send
        self._is_arriving = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        self._num_bytes = 0

    def send_through(self, wrap: Callable[[Send], Send]) -> None:
        """Wraps the function that sends the answer, so that `wrap` can change the messages."""
        self._send = wrap(self._send)

    async def receive(self) -> Message:
        """Receives the next message.

        Raises:
            RequestError: 401 if it is the end of the body of a revoked key.
            BodyTooLarge: the body exceeds its limit. Its rest has been read and dropped, up to three times the limit,
                because a client that is still sending would not read the answer.
        """
        message, limit = await self._receive(), self.body.limits.received_bytes
        if not self._is_arriving:
            return message
        self._num_bytes += len(message.get("body", b""))
        self._is_arriving = message.get("more_body", False)
        if is_too_large := self._num_bytes > limit:
            await self._drop(3 * limit)
        if self.auth and (is_too_large or not self._is_arriving) and message["type"] == "http.request":
            await self.auth.confirm(self.request)
        if is_too_large:
            raise BodyTooLarge(limit, message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        """Sends a message. Raises AnswerWithheld, after the refusal, if the key was revoked."""
        begins = message["type"] == "http.response.start"
        is_last = not begins and not message.get("more_body")
        if self.auth and not is_last and message.get("status") != 204:
            try:
                await self.auth.confirm(self.request)
            except HANDLED_ERRORS as error:
                self.auth = None
                if begins:
                    refusal = await handle_error(self.request, error)
                    await refusal(self.request.scope, self.receive, self.send)
                raise AnswerWithheld from None
        if begins:
            self.status = message["status"]
            notes = ((_NOTE, b"ignored: " + words.encode("unicode_escape")) for words in self.body.ignored)
            message["headers"] = [*message.get("headers", ()), *self.headers, *notes]
        elif is_last and self._is_arriving:
            await self._send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self._drop(DRAIN_BYTES)
            message = {"type": "http.response.body"}
        await self._send(message)

    async def refuse(self, refusal: Response) -> None:
        """Answers without waiting for the body."""
        if self._is_arriving:
            refusal.headers["Connection"] = "close"
        await refusal(self.request.scope, self.receive, self.send)

    async def _drop(self, most_bytes: int) -> None:
        """Reads and drops the rest of the body, up to a limit."""
        num_bytes = 0
        while self._is_arriving and num_bytes < most_bytes:
            message = await self._receive()
            num_bytes += len(message.get("body", b""))
            self._is_arriving = message.get("more_body", False)


class AnswerWithheld(Exception):
    """The key of a request was revoked before its answer was complete. The connection of one that has begun closes."""


def find_endpoints(routers: Sequence[APIRouter], names: Sequence[str]) -> Mapping[str, Endpoint]:
    """Returns path -> endpoint for the POST routes with these names.

    Their only parameters must be the request, the services and the tenant.
    """
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    found = {route.path: route.endpoint for route in routes if route.path.rpartition("/")[2] in names}
    assert len(found) == len(names), f"of {names} there are only {list(found)}"
    return found


class Gate:
    """ASGI middleware around all routes that admits a request or refuses it, and serves and reports those it admits.

    Sets `key` (on routes that take one) and `body` in the request's state.

    endpoints: the routes that are called directly, by path.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints
        self._allowed_hosts = frozenset(host.lower() for host in config.network.allowed_hosts)
        self._browser_gates = plugin_rows("server.console.rows", "GATES")
        self._limits = {is_large: body_limits(config, is_large) for is_large in (False, True)}
        self._ignored: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange, refusal = Exchange(scope, receive, send), None
        try:
            await check_head(exchange.request, self._allowed_hosts)
            for place, check_browser in self._browser_gates.items():
                if f"{scope['path']}/".startswith(f"{place}/"):
                    refusal = await check_browser(exchange)
        except HANDLED_ERRORS as error:
            refusal = await handle_error(exchange.request, error)
        if refusal is None:
            await self._serve(exchange)
        else:
            await exchange.refuse(refusal)

    async def _serve(self, exchange: Exchange) -> None:
        """Serves the request as long as its key is valid, and reports how it ended."""
        request, scope = exchange.request, exchange.request.scope
        services: Services = request.app.state.services
        route = find_route(request.method, scope["path"])
        work = services.telemetry.request_began(request.method, route, request.headers)
        if work.trace is not None:
            exchange.headers.append((_TRACE_ID, work.trace.encode()))
        exchange.body = request.state.body = Body.announced(request, self._limits[route in LARGE_BODIES])
        began_at = time.monotonic()
        try:
            if route is not None:
                try:
                    request.state.key = key = await services.auth.admit(request, route)
                except HANDLED_ERRORS as error:
                    await exchange.refuse(await handle_error(request, error))
                    return
                work.tenant, exchange.auth = key.tenant.id, services.auth
            await self._call_route(exchange, services)
        except AnswerWithheld:  # the connection of an answer that has begun is closed
            pass
        finally:
            for ignored in exchange.body.ignored:
                self._log_ignored(ignored)
            # The server keeps the scope of a connection's last request for as long as the connection is open.
            del request.state.body
            status, seconds = exchange.status or 500, time.monotonic() - began_at
            services.telemetry.request_ended(work, request.method, route, scope["path"], status, seconds)

    async def _call_route(self, exchange: Exchange, services: Services) -> None:
        scope, receive, send = exchange.request.scope, exchange.receive, exchange.send
        is_plain_post = scope["method"] == "POST" and not scope["query_string"]
        endpoint = self._endpoints.get(scope["path"]) if is_plain_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request, services, request.state.key.tenant)
        except HANDLED_ERRORS as error:
            response = await handle_error(request, error)
        await response(scope, receive, send)

    def _log_ignored(self, ignored: str) -> None:
        """Logs each unknown field that was ignored once."""
        if ignored not in self._ignored and len(self._ignored) < _MOST_IGNORED:
            self._ignored.add(ignored)
            logger.warning("ignored: %s", ignored.encode("unicode_escape").decode())


def find_route(method: str, path: str) -> str | None:
    """Returns "METHOD path-template" of a route that takes a key; None if it takes none or does not exist."""
    if (route := f"{method} {path}") in ROUTE_SCOPES:
        return route
    # Includes routes without parameters, because the router also matches a path with a trailing line break.
    return next((route for verb, pattern, route in _PATTERNS if verb == method and pattern.match(path)), None)


async def check_head(request: Request, allowed_hosts: Collection[str]) -> None:
    """Raises RequestError if the head is not readable, or not meant for this server.

    A server that listens on a loopback address and has no keys answers only under names that no page of another site
    can have: a site whose name leads to 127.0.0.1 (DNS rebinding) would else use it through its visitors' browsers.
    Such names are loopback addresses, names without a dot, as containers have, and `allowed_hosts`.
    """
    auth: Auth = request.app.state.services.auth
    if not request.scope["query_string"].isascii():
        request.scope["query_string"] = b""  # which the answer could not describe
        auth.unauthenticated_limits.take(address_of(request))
        raise RequestError("the query is not ASCII: percent-encode it, as UTF-8")
    hosts = request.headers.getlist("host") if auth.is_loopback else []
    if all(is_local_host(host, allowed_hosts) for host in hosts) or not await auth.is_open():
        return
    auth.unauthenticated_limits.take(address_of(request))
    raise RequestError(
        f"this server has no keys, so it answers only under loopback names, and not under {hosts[0][:100]!r}: make "
        "a key with `trainhouse keys create NAME`, or start the server with --allowed-host HOST",
        status=403,
    )


def is_local_host(host: str, others: Collection[str] = ()) -> bool:
    """True if no site of the internet can have the name in this Host header, or it is one of the others."""
    if (found := _HOST.fullmatch(host)) is None:
        return False
    name = found[1].strip("[]").lower().rstrip(".")
    return name in others or ("." not in name and ":" not in name) or is_loopback(name) or name.endswith(".localhost")


def is_local_request(request: Request) -> bool:
    """True if a program on this machine sent the request, and no proxy that shows itself has passed it on."""
    if not is_loopback(address_of(request)) or request.scope.get("http_version") == "1.0":
        return False
    if any("forwarded" in name or name in _OF_PROXIES for name in request.headers):
        return False
    return all(map(is_local_host, request.headers.getlist("host")))


def check_query(request: Request) -> None:
    """Raises UnknownField for query parameters that a route does not have: a list would ignore a misspelt limit.

    Routes without a key (probes, signed downloads) take what others append to addresses.
    """
    if not request.query_params or not hasattr(request.state, "key"):
        return
    route = request.scope["route"]
    known = list(_names(route.dependant))
    unknown = next((name for name in request.query_params if name not in known), None)
    if unknown is None:
        return
    words = describe_unknown(f"the query of {route.path_format}", unknown, known)
    body: Body = request.state.body
    if body.tolerance == "none":
        raise UnknownField(words, False)
    body.ignored.append(words)


def _names(dependant: Dependant) -> Iterator[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for below in dependant.dependencies:
        yield from _names(below)

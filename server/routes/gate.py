"""Gate: checks a request before its body is read, and calls the routes.

The routes that clients call for every operation are called directly: FastAPI takes longer to resolve their dependencies
than they take to run. They stay registered with FastAPI for the OpenAPI document and for any request other than a plain
POST.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from ...workers.protocol.plugins import plugin_rows
from ..config.server_config import ServerConfig
from ..http.bodies import Body, body_limits
from ..http.errors import HANDLED_ERRORS, handle_error
from ..tenants.auth import Tenant
from ..tenants.exchange import AnswerWithheld, Exchange
from ..tenants.head_check import check_head
from ..tenants.scopes import LARGE_BODIES, find_route
from .services import Services

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request, Services, Tenant], Awaitable[Response]]

_TRACE_ID = b"x-trace-id"
_MOST_IGNORED = 256


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
                work.tenant, exchange.is_admitted = key.tenant.id, True
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

"""Checks the head of a request before all else: that it is readable, and that it is meant for this server."""

import re

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ...schemas.adapters.model_files import is_loopback
from ...schemas.errors import RequestError
from ..http.bodies import has_body
from ..http.errors import HANDLED_ERRORS, handle_error
from .auth import Auth, address_of

_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::[^.@:]*)?", re.DOTALL)
_OF_PROXIES = frozenset({"via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip", "cdn-loop"})


class HeadCheck:
    """ASGI middleware, the outermost.

    A server that listens on a loopback address and has no keys answers only under names that no page of another site
    can have: a site whose name leads to 127.0.0.1 (DNS rebinding) would else use it through its visitors' browsers.
    Such names are loopback addresses, names without a dot, as containers have, and `allowed_hosts`.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: tuple[str, ...]) -> None:
        self._app = app
        self._allowed = frozenset(host.lower() for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            await self._check(request)
        except HANDLED_ERRORS as error:
            refusal = await handle_error(request, error)
            if has_body(scope):
                refusal.headers["Connection"] = "close"
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _check(self, request: Request) -> None:
        """Raises RequestError."""
        auth: Auth = request.app.state.services.auth
        if not request.scope["query_string"].isascii():
            request.scope["query_string"] = b""  # which the answer could not describe
            auth.unauthenticated_limits.take(address_of(request))
            raise RequestError("the query is not ASCII: percent-encode it, as UTF-8")
        hosts = request.headers.getlist("host") if auth.is_loopback else []
        if all(is_local_host(host) or _name_in(host) in self._allowed for host in hosts) or not await auth.is_open():
            return
        auth.unauthenticated_limits.take(address_of(request))
        raise RequestError(
            f"this server has no keys, so it answers only under loopback names, and not under {hosts[0][:100]!r}: make "
            "a key with `trainhouse keys create NAME`, or start the server with --allowed-host HOST",
            status=403,
        )


def is_local_host(host: str) -> bool:
    """True if no site of the internet can have the name in this Host header."""
    if (name := _name_in(host)) is None:
        return False
    return ("." not in name and ":" not in name) or is_loopback(name) or name.endswith(".localhost")


def is_local_request(request: Request) -> bool:
    """True if a program on this machine sent the request, and no proxy that shows itself has passed it on."""
    if not is_loopback(address_of(request)) or request.scope.get("http_version") == "1.0":
        return False
    if any("forwarded" in name or name in _OF_PROXIES for name in request.headers):
        return False
    return all(map(is_local_host, request.headers.getlist("host")))


def _name_in(host: str) -> str | None:
    found = _HOST.fullmatch(host)
    return None if found is None else found[1].strip("[]").lower().rstrip(".")

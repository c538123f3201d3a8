"""Lets signed-in browsers into the console: turns the cookie into the key that it stands for.

After it, the console's requests are like any other: the gate checks the key's scope and rate, and routes see its
tenant. A page's scripts call some routes of the API below /console, so that the cookie, which browsers send only there,
is enough for them.
"""

import hmac
import json
from functools import partial
from urllib.parse import quote, urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Scope, Send

from ...schemas.errors import RequestError
from ..routes.gate import Exchange, find_route
from ..routes.services import Services
from ..tenants.auth import address_of, presented_key
from ..tenants.browser_sessions import BrowserSession
from .paths import CONSOLE, SIGN_IN
from .templates import error_page
from .visitor import signed_in_visitor

_COOKIE = "trainhouse_console"
FORM_TOKEN = "X-Form-Token"
"""The header that every changing request of a signed-in browser needs. Pages of other sites can neither read the token
nor send the header."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
_API = frozenset(
    {
        "GET /api/v1/training_runs/{run_id}/metrics",
        "POST /api/v1/sessions/{session_id}/finish",
        f"DELETE {_CHECKPOINT}",
        f"POST {_CHECKPOINT}/publish",
        f"DELETE {_CHECKPOINT}/publish",
        f"PUT {_CHECKPOINT}/ttl",
        f"GET {_CHECKPOINT}/external_weights_urls",
        "POST /v1/completions",
        "POST /v1/chat/completions",
    }
)
"""Routes of the API that scripts of pages call, at /console/api/v1/... and /console/v1/..."""


def cookie_name(request: Request) -> str:
    """Returns a name with the port, since browsers send a host's cookies to all of its ports: servers must not sign
    each other's browsers out."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"{_COOKIE}_{port}" if port.isascii() and port.isdecimal() else _COOKIE


async def check_browser(exchange: Exchange) -> Response | None:
    """Returns the answer to a request below /console that is not let in; otherwise puts the key of a signed-in browser
    into its headers, and the API's path in place of the console's. Raises one of HANDLED_ERRORS."""
    request = exchange.request
    exchange.send_through(partial(_Answer, request))
    if (refusal := await _refusal(request)) is None:
        _rewrite(request.scope)
        exchange.request = Request(request.scope)  # which has not read the path and the headers yet
    return refusal


async def _refusal(request: Request) -> Response | None:
    path, is_change = request.url.path, request.method not in ("GET", "HEAD")
    services: Services = request.app.state.services
    if path == SIGN_IN or path.startswith(f"{CONSOLE}/static/"):
        if not is_change or _is_same_origin(request):
            return None
        services.auth.unauthenticated_limits.take(address_of(request))
        return _detail("the form was sent from another site: open the console itself", 403)
    if (inner := _api_path(path)) is not None and find_route(request.method, inner) not in _API:
        return _detail(f"there is no {request.method} {path} here: use the API with a key, see /docs", 404)
    session = services.browsers.find(request.cookies.get(cookie_name(request)))
    if session is None or not await _is_valid(services, session):
        # A program may also read pages with its key, like the API.
        return None if presented_key(request) else _to_sign_in(request)
    given = request.headers.get(FORM_TOKEN, "")
    if is_change and not hmac.compare_digest(given.encode(), session.form_token.encode()):
        return _detail(f"the request has no valid {FORM_TOKEN}: reload the page and try again", 403)
    request.state.browser = session
    others = [one for one in request.scope["headers"] if one[0] not in (b"x-api-key", b"authorization")]
    request.scope["headers"] = [*others, (b"x-api-key", session.token.encode())]
    return None


async def _is_valid(services: Services, session: BrowserSession) -> bool:
    """False if the key was revoked."""
    try:
        await services.auth.authenticate(session.token)
    except RequestError:
        return False
    return True


def _rewrite(scope: Scope) -> None:
    """Changes the path of a request to the API."""
    if (inner := _api_path(scope["path"])) is not None:
        scope["path"] = inner
        if scope.get("raw_path") is not None:
            scope["raw_path"] = scope["raw_path"].removeprefix(CONSOLE.encode())


def _api_path(path: str) -> str | None:
    inner = path.removeprefix(CONSOLE)
    return inner if inner.startswith(("/api/v1/", "/v1/")) else None


def _is_same_origin(request: Request) -> bool:
    """True if a page of this server sent the request, or a program that is no browser."""
    if site := request.headers.get("sec-fetch-site"):
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == request.headers.get("host")
    except ValueError:
        return False


def _to_sign_in(request: Request) -> Response:
    if request.method != "GET" or "text/html" not in request.headers.get("accept", ""):
        return _detail(f"you are not signed in, or no longer: sign in at {SIGN_IN}", 401)
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"{SIGN_IN}?next={quote(path)}", 303)


def _detail(message: str, status: int) -> Response:
    return JSONResponse({"detail": message}, status)


class _Answer:
    """Adds the headers of pages to a response, and shows an error to a browser as a page."""

    def __init__(self, request: Request, send: Send) -> None:
        self._wants_page = "text/html" in request.headers.get("accept", "") and _api_path(request.url.path) is None
        self._scope = request.scope
        self._send = send
        self._error: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message["headers"])
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            is_json = headers.get("content-type", "").startswith("application/json")
            if self._wants_page and message["status"] >= 400 and is_json:
                self._error = message
                return
        elif self._error is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_page(self._error)
            return
        await self._send(message)

    async def _send_page(self, start: Message) -> None:
        visitor = await signed_in_visitor(self._scope)
        page = error_page(visitor, start["status"], str(json.loads(self._body).get("detail"))).encode()
        headers = MutableHeaders(raw=start["headers"])
        headers["Content-Type"], headers["Content-Length"] = "text/html; charset=utf-8", str(len(page))
        await self._send({**start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": page})

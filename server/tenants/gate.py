"""Checks a request before its body is read: its tenant, its scope, its rate, and the size of its body. Checks its key
again when the body has arrived and while the answer is sent."""

import logging
import time

from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...schemas.errors import RequestError
from ...workers.protocol.work_context import WorkContext
from ..config.server_config import ServerConfig
from ..http.bodies import Body, BodyTooLarge, body_limits, has_body, limited
from ..http.errors import HANDLED_ERRORS, handle_error
from ..telemetry.telemetry import Telemetry
from .auth import Auth, admitted_key
from .scopes import LARGE_BODIES, find_route

logger = logging.getLogger(__name__)

_TRACE_ID, _NOTE = b"x-trace-id", b"x-deprecation-note"
_MOST_IGNORED = 256


class Gate:
    """ASGI middleware around all routes that authenticates a request and limits its body.

    Sets `key` (on routes that take one) and `body` in the request's state; reading a body beyond the limits
    raises BodyTooLarge, and reading the end of one whose key has been revoked since its head arrived, RequestError.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._ignored: set[str] = set()
        self._limits = {is_large: body_limits(config, is_large) for is_large in (False, True)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, route = Request(scope), find_route(scope["method"], scope["path"])
        telemetry: Telemetry = request.app.state.services.telemetry
        work = telemetry.request_began(request.method, route, request.headers)
        request.state.body = body = Body.announced(request, self._limits[route in LARGE_BODIES])
        status, began_at = 500, time.monotonic()

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [] if work.trace is None else [(_TRACE_ID, work.trace.encode())]
                added += [(_NOTE, self._noted(words)) for words in body.ignored]
                if added:
                    message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            if route is not None and (refusal := await self._refusal(request, route, work)) is not None:
                await refusal(scope, receive, send_noting_status)
                return
            receive = limited(receive, body.limits.received_bytes)
            if route is None:
                await self._app(scope, receive, send_noting_status)
            else:
                await self._serve(request, receive, send_noting_status)
        finally:
            # The server keeps the scope of a connection's last request for as long as the connection is open.
            del request.state.body
            seconds = time.monotonic() - began_at
            telemetry.request_ended(work, request.method, route, scope["path"], status, seconds)

    def _noted(self, ignored: str) -> bytes:
        """Returns a header that SDKs log, for an unknown field that was ignored; the log says each of them once."""
        words = ignored.encode("unicode_escape")
        if ignored not in self._ignored and len(self._ignored) < _MOST_IGNORED:
            self._ignored.add(ignored)
            logger.warning("ignored: %s", words.decode())
        return b"ignored: " + words

    async def _refusal(self, request: Request, route: str, work: WorkContext) -> Response | None:
        """Returns the response to a request that is refused, without waiting for its body; None if it is admitted."""
        try:
            request.state.key = key = await request.app.state.services.auth.admit(request, route)
        except HANDLED_ERRORS as error:
            refusal = await handle_error(request, error)
            if has_body(request.scope):
                refusal.headers["Connection"] = "close"
            return refusal
        work.tenant = key.tenant.id
        return None

    async def _serve(self, request: Request, receive: Receive, send: Send) -> None:
        """Serves an admitted request as long as its key is valid."""

        async def receive_confirmed() -> Message:
            try:
                message = await receive()
            except BodyTooLarge:
                await confirm_key(request)
                raise
            if message["type"] == "http.request" and not message.get("more_body"):
                await confirm_key(request)
            return message

        async def send_confirmed(message: Message) -> None:
            begins = message["type"] == "http.response.start"
            if message["status"] != 204 if begins else message.get("more_body", False):
                try:
                    await confirm_key(request)
                except HANDLED_ERRORS as error:
                    if begins:
                        refusal = await handle_error(request, error)
                        await refusal(request.scope, receive, send)
                    raise _AnswerWithheld from None
            await send(message)

        try:
            await self._app(request.scope, receive_confirmed, send_confirmed)
        except _AnswerWithheld:  # the connection of an answer that has begun is closed
            return


class _AnswerWithheld(Exception):
    """The key of a request was revoked before its answer was complete."""


async def confirm_key(request: Request) -> None:
    """Raises RequestError 401 if the request's key has been revoked, or its browser has signed out, since it was
    admitted."""
    services = request.app.state.services
    auth: Auth = services.auth
    await auth.confirm(admitted_key(request))
    browser = getattr(request.state, "browser", None)
    if browser is not None and not services.browsers.is_signed_in(browser):
        raise RequestError("this browser has signed out: sign in again", 401)

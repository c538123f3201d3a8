"""Checks a request before its body is read: its tenant, its scope, its rate, and the size of its body."""

import time

from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...workers.protocol.work_context import WorkContext
from ..config.server_config import ServerConfig
from ..http.bodies import body_limits, has_body, limited
from ..http.errors import HANDLED_ERRORS, handle_error
from ..telemetry.telemetry import Telemetry
from .scopes import LARGE_BODIES, find_route

_TRACE_ID = b"x-trace-id"


class Gate:
    """ASGI middleware around all routes that authenticates a request and limits its body.

    Sets `tenant` (on routes that take a key) and `body_limits` in the request's state; reading a body beyond the
    limits raises BodyTooLarge.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._limits = {is_large: body_limits(config, is_large) for is_large in (False, True)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, route = Request(scope), find_route(scope["method"], scope["path"])
        telemetry: Telemetry = request.app.state.services.telemetry
        work = telemetry.request_began(request.method, route, request.headers)
        status, began_at = 500, time.monotonic()

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if work.trace is not None:
                    message["headers"] = [*message.get("headers", ()), (_TRACE_ID, work.trace.encode())]
            await send(message)

        try:
            if route is not None and (refusal := await self._refusal(request, route, work)) is not None:
                await refusal(scope, receive, send_noting_status)
                return
            request.state.body_limits = limits = self._limits[route in LARGE_BODIES]
            await self._app(scope, limited(receive, limits.received_bytes), send_noting_status)
        finally:
            seconds = time.monotonic() - began_at
            telemetry.request_ended(work, request.method, route, scope["path"], status, seconds)

    async def _refusal(self, request: Request, route: str, work: WorkContext) -> Response | None:
        """Returns the response to a request that is refused, without waiting for its body; None if it is admitted."""
        try:
            request.state.tenant = tenant = await request.app.state.services.auth.admit(request, route)
        except HANDLED_ERRORS as error:
            refusal = await handle_error(request, error)
            if has_body(request.scope):
                refusal.headers["Connection"] = "close"
            return refusal
        work.tenant = tenant.id
        return None

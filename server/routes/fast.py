"""Dispatches the routes that clients call for every operation directly, bypassing FastAPI.

FastAPI takes longer to resolve the dependencies of these routes than they take to run. They stay registered with
FastAPI for the OpenAPI document and for any request other than a plain POST.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.errors import HANDLED_ERRORS, handle_error
from ..tenants.auth import Tenant, admitted_key
from .services import Services

Endpoint = Callable[[Request, Services, Tenant], Awaitable[Response]]


def find_endpoints(routers: Sequence[APIRouter], names: Sequence[str]) -> Mapping[str, Endpoint]:
    """Returns path -> endpoint for the POST routes with these names.

    Their only parameters must be the request, the services and the tenant.
    """
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    found = {route.path: route.endpoint for route in routes if route.path.rpartition("/")[2] in names}
    assert len(found) == len(names), f"of {names} there are only {list(found)}"
    return found


class FastRoutes:
    """ASGI middleware that calls the endpoints itself."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_plain_post = scope["type"] == "http" and scope["method"] == "POST" and not scope["query_string"]
        endpoint = self._endpoints.get(scope["path"]) if is_plain_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request, request.app.state.services, admitted_key(request).tenant)
        except HANDLED_ERRORS as error:
            response = await handle_error(request, error)
        await response(scope, receive, send)

"""Visitor: who looks at a page, and what its key permits."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse
from starlette.types import Scope

from ...workers.protocol.plugins import plugin_rows
from ..http.errors import HANDLED_ERRORS
from ..routes.services import Services
from ..tenants.auth import AuthenticatedKey, Tenant, TenantDependency, address_of, admitted_key
from ..tenants.browser_sessions import BrowserSession
from ..tenants.scopes import OPERATOR
from .templates import render


@dataclass(frozen=True)
class PageLink:
    """A page that all others link to. scope: what a key needs for it."""

    path: str
    name: str
    scope: str


MODEL_LISTS = plugin_rows("server.openai.rows", "MODEL_LISTS")
"""Lists what OpenAI's API samples, as the playground does; empty without the API."""

PAGES = (
    PageLink("/console/runs", "Runs", "read"),
    PageLink("/console/sessions", "Sessions", "read"),
    PageLink("/console/checkpoints", "Checkpoints", "read"),
    *(PageLink("/console/playground", "Playground", "sample") for _ in MODEL_LISTS),
    PageLink("/console/data", "Data", "read"),
    PageLink("/console/capacity", "Capacity", OPERATOR),
    PageLink("/console/admin", "Admin", OPERATOR),
)


@dataclass(frozen=True)
class Visitor:
    """The tenant of a signed-in browser. form_token: scripts send it with requests that change something."""

    tenant: Tenant
    scopes: tuple[str, ...]
    form_token: str
    path: str

    @property
    def pages(self) -> list[PageLink]:
        return [page for page in PAGES if page.scope in self.scopes]


async def _current_visitor(request: Request, _: TenantDependency) -> Visitor:
    return _visitor(request, admitted_key(request), getattr(request.state, "browser", None))


async def signed_in_visitor(scope: Scope) -> Visitor | None:
    """Returns the visitor of a request that `check_browser` has let in by its cookie; None for others, and where the
    key can no longer be read."""
    request = Request(scope)
    browser: BrowserSession | None = getattr(request.state, "browser", None)
    services: Services = request.app.state.services
    if browser is None:
        return None
    try:
        key = await services.auth.identify(browser.token, address_of(request))
    except HANDLED_ERRORS:
        return None
    return _visitor(request, key, browser)


def _visitor(request: Request, key: AuthenticatedKey, browser: BrowserSession | None) -> Visitor:
    return Visitor(key.tenant, key.scopes, browser.form_token if browser else "", request.url.path)


VisitorDependency = Annotated[Visitor, Depends(_current_visitor)]


def page(visitor: Visitor, template: str, **content: object) -> HTMLResponse:
    return HTMLResponse(render(template, visitor=visitor, **content))

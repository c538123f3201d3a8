"""The visitor of a page with the permissions of their key, and the pages of a list."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Depends, Query, Request
from fastapi.responses import HTMLResponse
from starlette.types import Scope

from ...schemas.bounds import MAX_ID
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


PageNumber = Annotated[int, Query(alias="page", ge=1, le=1_000_000)]
Search = Annotated[str, Query(max_length=MAX_ID)]
PER_PAGE = 25


def offset_of(number: int) -> int:
    return PER_PAGE * (number - 1)


@dataclass(frozen=True)
class Pages:
    """The present page of a list, from 1, and the links to the others. query: of its filters."""

    path: str
    query: Mapping[str, str]
    number: int
    num_entries: int

    @property
    def last(self) -> int:
        return max(1, -(-self.num_entries // PER_PAGE))

    @property
    def words(self) -> str:
        first = offset_of(self.number) + 1
        if first > self.num_entries:
            return f"none of {self.num_entries:,}"
        return f"{first:,} to {min(first + PER_PAGE - 1, self.num_entries):,} of {self.num_entries:,}"

    def url(self, number: int) -> str:
        query = {name: value for name, value in self.query.items() if value}
        return f"{self.path}?{urlencode({**query, 'page': number})}"

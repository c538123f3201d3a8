"""Visitor: who looks at a page, and what its key permits."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse

from ..routes.services import Services, ServicesDependency
from ..tenants.auth import Tenant, TenantDependency, presented_key
from ..tenants.scopes import OPERATOR, SCOPES, TENANT_SCOPES
from .templates import render


@dataclass(frozen=True)
class PageLink:
    """A page that all others link to. scope: what a key needs for it."""

    path: str
    name: str
    scope: str


PAGES = (
    PageLink("/console/runs", "Runs", "read"),
    PageLink("/console/sessions", "Sessions", "read"),
    PageLink("/console/checkpoints", "Checkpoints", "read"),
    PageLink("/console/playground", "Playground", "sample"),
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


async def _current_visitor(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Visitor:
    scopes = await scopes_of(request, services)
    return Visitor(tenant, scopes, getattr(request.state, "form_token", ""), request.url.path)


async def scopes_of(request: Request, services: Services) -> tuple[str, ...]:
    """Returns the scopes of the request's key; all on an open server."""
    record = await services.auth.key_of(presented_key(request) or "")
    return SCOPES if record is None else record.scopes or TENANT_SCOPES


VisitorDependency = Annotated[Visitor, Depends(_current_visitor)]


def page(visitor: Visitor, template: str, **content: object) -> HTMLResponse:
    return HTMLResponse(render(template, visitor=visitor, **content))

"""Visitor: who looks at a page, and what its key permits."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse

from ..routes.services import ServicesDependency
from ..tenants.auth import Tenant, TenantDependency, presented_key
from ..tenants.scopes import SCOPES, TENANT_SCOPES
from .templates import render


@dataclass(frozen=True)
class Visitor:
    """The tenant of a signed-in browser. form_token: scripts send it with requests that change something."""

    tenant: Tenant
    scopes: tuple[str, ...]
    form_token: str
    path: str


async def _current_visitor(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Visitor:
    record = await services.auth.key_of(presented_key(request) or "")
    scopes = SCOPES if record is None else record.scopes or TENANT_SCOPES
    return Visitor(tenant, scopes, getattr(request.state, "form_token", ""), request.url.path)


VisitorDependency = Annotated[Visitor, Depends(_current_visitor)]


def page(visitor: Visitor, template: str, **content: object) -> HTMLResponse:
    return HTMLResponse(render(template, visitor=visitor, **content))

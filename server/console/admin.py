"""The page of tenants, keys and limits; for operators. Keys are made and revoked by those who also have scope admin."""

from dataclasses import fields
from typing import Annotated, Literal

from fastapi import APIRouter, Path
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import Field

from ...schemas.bounds import Id
from ...schemas.errors import RequestError
from ...schemas.training import MAX_INTEGER, Strict
from ..http.bodies import json_parameter
from ..routes.models import get_limits
from ..routes.services import ServicesDependency
from ..tenants.auth import Tenant, create_key, list_keys
from ..tenants.scopes import SCOPES, TENANT_SCOPES
from .paging import PageNumber, Pages
from .paths import CONSOLE
from .visitor import Visitor, VisitorDependency, page

router = APIRouter(prefix=CONSOLE, include_in_schema=False)

_PER_PAGE = 25


class NewKey(Strict):
    """Asks for a key of the tenant with this name, and for the tenant if there is none."""

    name: Id
    scopes: Annotated[list[Literal["train", "sample", "read", "admin", "operator"]], Field(min_length=1, max_length=5)]
    requests_per_minute: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None


@router.get("/admin")
async def show_admin(services: ServicesDependency, visitor: VisitorDependency, number: PageNumber = 1) -> HTMLResponse:
    keys = await list_keys(services.store)
    tenants = sorted(await services.store.tenants.list_all(), key=lambda one: one.created_at, reverse=True)
    shown = tenants[_PER_PAGE * (number - 1) : _PER_PAGE * number]
    usage = [await get_limits(services, Tenant(one.tenant_id, one.name), True) for one in shown]
    names = {one.name for one in shown}
    limits = services.config.limits
    return page(
        visitor,
        "admin.html",
        tenants=list(zip(shown, usage, strict=True)),
        keys=[key for key in reversed(keys) if key.name in names],
        pages=Pages(f"{CONSOLE}/admin", {}, number, _PER_PAGE, len(tenants)),
        scopes=SCOPES,
        usual_scopes=TENANT_SCOPES,
        limits={field.name: getattr(limits, field.name) for field in fields(limits)},
        has_keys=bool(keys),
        may_change="admin" in visitor.scopes and bool(visitor.form_token),
    )


@router.post("/admin/keys")
async def make_key(
    request: Annotated[NewKey, json_parameter(NewKey)], services: ServicesDependency, visitor: VisitorDependency
) -> JSONResponse:
    """Makes a key, which is shown this once."""
    _require_admin(visitor)
    if not await list_keys(services.store):
        raise RequestError(
            "this server has no keys, so everyone who reaches it may do everything: make the first one with "
            "`trainhouse keys create NAME`, after which made-up keys no longer work"
        )
    scopes = tuple(scope for scope in SCOPES if scope in request.scopes)
    try:
        key = await create_key(services.store, request.name, scopes, request.requests_per_minute)
    except ValueError as error:
        raise RequestError(str(error)) from None
    return JSONResponse({"key": key})


@router.post("/admin/keys/{key_id}/revoke", status_code=204)
async def revoke_key(
    key_id: Annotated[int, Path(ge=0, le=MAX_INTEGER)], services: ServicesDependency, visitor: VisitorDependency
) -> None:
    """Revokes a key of any tenant at once."""
    _require_admin(visitor)
    found = [key for key in await services.store.keys.list_all() if key.key_id == key_id and key.revoked_at is None]
    if not found:
        raise RequestError(f"there is no key {key_id} in force: reload the page", status=404)
    await services.auth.revoke(found[0])


def _require_admin(visitor: Visitor) -> None:
    if "admin" not in visitor.scopes:
        raise RequestError(
            "this key has the scope operator without admin, so it sees all tenants and changes nothing: sign in with a "
            "key made by `trainhouse keys create NAME --scopes admin,operator`",
            status=403,
        )

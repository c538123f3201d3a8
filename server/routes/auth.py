"""Routes with which a client describes, revokes or exchanges its own API key (`tinker auth login` and `logout`)."""

from fastapi import APIRouter, Request

from ...schemas.errors import RequestError
from ...schemas.models import KeyDetails, KeyOrganization, KeyUser, OwnKey, TokenResponse
from ..tenants.auth import TenantDependency, admitted_key
from .services import ServicesDependency

router = APIRouter(prefix="/api/v1/auth", tags=["auth"])


@router.post("/token")
async def token(request: Request, services: ServicesDependency, tenant: TenantDependency) -> TokenResponse:
    """Returns a token that can replace the key for an hour, until the key is revoked or the server restarts."""
    return TokenResponse(jwt=services.auth.token_for(admitted_key(request)))


@router.get("/apikey/me")
async def own_key(request: Request, tenant: TenantDependency) -> OwnKey:
    """Describes the caller's key: its tenant, scopes and rate limit."""
    record = admitted_key(request).key
    return OwnKey(
        key_id=0 if record is None else record.key_id,
        name=tenant.name,
        note="a key of this open server" if record is None else "",
        details=KeyDetails(org_details=KeyOrganization(name="trainhouse"), user_details=KeyUser(email=tenant.name)),
        scopes=list(admitted_key(request).scopes),
        requests_per_minute=None if record is None else record.requests_per_minute,
    )


@router.delete("/apikey/me", status_code=204)
async def revoke_own_key(request: Request, services: ServicesDependency, tenant: TenantDependency) -> None:
    """Revokes the caller's key. Answers 404 on an open server, which accepts any key and stores none."""
    record = admitted_key(request).key
    if record is None:
        raise RequestError("this server did not create the key, so it cannot revoke it", status=404)
    await services.auth.revoke(record)

"""Who is asking: an API key stands for a tenant, and may have scopes and a rate. Keys are kept as hashes alone.

Which tenant may see what is decided where the thing is looked up: sessions, runs, checkpoints.
"""

import hmac
import secrets
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, TypeVar

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader

from ...schemas.errors import RequestError
from ..config.knobs import ServerConfig
from ..store import ApiKeyRecord, KeyCounts, Store, TenantRecord
from .rate_limits import UNCOUNTED, RateLimits, Strangers
from .scopes import OPERATOR, TENANT_SCOPES, check_scopes
from .tokens import Tokens

T = TypeVar("T")

KEY_PREFIX = "tml-"
CACHE_SECONDS = 1.0
_MOST_CACHED = 10_000


@dataclass(frozen=True)
class Tenant:
    id: str
    name: str


@dataclass(frozen=True)
class _Known:
    """Whom a key stands for. key: None where an open server let it in."""

    tenant: Tenant
    key: ApiKeyRecord | None


class Auth:
    """Key, or a token that stands for one, -> tenant. A key revoked by another process is refused within CACHE_SECONDS,
    one revoked here at once.

    `loopback`: only this machine reaches the server. Then, as long as no key was ever made, any `tml-` key is let
    in and is its own tenant.
    """

    def __init__(
        self,
        store: Store,
        loopback: bool,
        clock: Callable[[], float] = time.monotonic,
        strangers_per_minute: int = ServerConfig.unauthenticated_per_minute,
    ) -> None:
        self._store = store
        self._loopback = loopback
        self._clock = clock
        self._tokens = Tokens()
        self._rates = RateLimits(clock)
        self._strangers = Strangers(strangers_per_minute, clock)
        # Valid while the store's counts of keys stay as they are. Then replaced by new ones, so that a look-up that
        # began before writes to those that nobody reads. Refused keys are apart and push out none that is in force.
        self._known: dict[str, _Known] = {}
        self._refused: dict[str, None] = {}
        # Keys that were in force once: they are looked up again however many strangers there are.
        self._familiar: dict[str, None] = {}
        self._counts: KeyCounts | None = None
        self._counted_until = 0.0

    async def admit(self, request: Request, route: str) -> Tenant:
        """Who sends it. Raises RequestError 401, or 429 where its address has sent too many such requests; 403 and 429
        where the key lacks the scope or exceeds its rate."""
        known = await self._require(presented_key(request), address_of(request))
        if known.key is not None:
            self._check(known.key, route)
        return known.tenant

    async def authenticate(self, key: str | None) -> Tenant:
        """Raises RequestError 401."""
        return (await self._require(key)).tenant

    async def token_for(self, key: str) -> str:
        """A token that stands for the key for an hour. Raises RequestError 401."""
        tenant = await self.authenticate(key)
        return self._tokens.issue(self._tokens.key_hash_of(key) or hash_key(key), tenant.id, tenant.name)

    async def tenant_of(self, key: str) -> Tenant | None:
        """Whose weights may be read with the key; None for one that is not in force, or has not the scope read."""
        known = await self._look_up(key)
        if known is None or (known.key is not None and "read" not in (known.key.scopes or ("read",))):
            return None
        return known.tenant

    async def is_operator(self, key: str | None, address: str) -> bool:
        """True if whoever shows this may see what concerns all tenants; on an open server everybody is that. Raises
        RequestError 429 as `admit` does."""
        if not key:
            return await self._is_open()
        known = await self._look_up(key, address)
        return known is not None and (known.key is None or OPERATOR in (known.key.scopes or ()))

    async def key_of(self, key: str) -> ApiKeyRecord | None:
        """The record behind a key in force; None for the keys of an open loopback server."""
        known = await self._look_up(key)
        return None if known is None else known.key

    async def revoke(self, key: ApiKeyRecord) -> None:
        await revoke_key(self._store, key.key_id)
        self._forget()

    def _check(self, key: ApiKeyRecord, route: str) -> None:
        if key.requests_per_minute is not None and route not in UNCOUNTED:
            self._rates.take(key.key_id, key.requests_per_minute)
        check_scopes(key.scopes or TENANT_SCOPES, route)

    async def _require(self, key: str | None, address: str | None = None) -> _Known:
        """address: of who sends the key, if that is limited. Raises RequestError 401, 429."""
        known = await self._look_up(key, address) if key else None
        if known is not None:
            return known
        if address is not None:
            self._strangers.take(address)
        if not key:
            raise RequestError(
                "no API key: send the header X-API-Key (or Authorization: Bearer), or set TINKER_API_KEY", status=401
            )
        raise RequestError(_refusal(key, self._was_open()), status=401)

    async def _look_up(self, key: str, address: str | None = None) -> _Known | None:
        """None for a key that is not in force. Raises RequestError 429 rather than ask the store for an address that
        has sent too many such keys."""
        if self._clock() >= self._counted_until:
            await self._count()
        stood_for = self._tokens.key_hash_of(key)
        key_hash = stood_for or hash_key(key)
        in_force, refused = self._known, self._refused
        if key_hash in in_force:
            return in_force[key_hash]
        if key_hash in refused:
            return None
        if address is not None and key_hash not in self._familiar:
            self._strangers.check(address)
        known = await self._ask_store(key_hash, bool(stood_for) or key.startswith(KEY_PREFIX))
        if known is not None:
            _keep(in_force, key_hash, known)
            _keep(self._familiar, key_hash, None)
        else:
            self._familiar.pop(key_hash, None)
            _keep(refused, key_hash, None)
        return known

    def _forget(self) -> None:
        self._known, self._refused = {}, {}

    async def _count(self) -> None:
        """One question for all keys: each may be that of a tenant who sends many small requests."""
        # Before the answer: who asks meanwhile need not ask the store, too.
        before, self._counted_until = self._counted_until, self._clock() + CACHE_SECONDS
        try:
            counts = await self._store.count_keys()
        except BaseException:
            self._counted_until = before
            raise
        if counts != self._counts:
            self._forget()
            self._counts = counts

    async def _ask_store(self, key_hash: str, may_be_new: bool) -> _Known | None:
        record = await self._store.find_key(key_hash)
        if record is not None and hmac.compare_digest(record.key_hash, key_hash) and record.revoked_at is None:
            tenant = await self._store.get_tenant(record.tenant_id)
            assert tenant is not None
            return _Known(Tenant(tenant.tenant_id, tenant.name), record)
        if record is None and may_be_new and await self._is_open():
            return _Known(await self._own_tenant(key_hash), None)
        return None

    async def _is_open(self) -> bool:
        return self._loopback and (await self._store.count_keys()).made == 0

    def _was_open(self) -> bool:
        """When keys were last counted."""
        return self._loopback and self._counts is not None and self._counts.made == 0

    async def _own_tenant(self, key_hash: str) -> Tenant:
        tenant = Tenant(f"local-{key_hash[:16]}", f"local-{key_hash[:16]}")
        await self._store.ensure_tenant(TenantRecord(tenant.id, tenant.name, time.time()))
        return tenant


def _keep(cache: dict[str, T], key_hash: str, found: T) -> None:
    """In place of the oldest, where there are too many."""
    while len(cache) >= _MOST_CACHED:
        del cache[next(iter(cache))]
    cache[key_hash] = found


def _refusal(key: str, is_open: bool) -> str:
    if not key.startswith(KEY_PREFIX):
        made_up = f"send any that does, such as {KEY_PREFIX}me, as no key was made here yet, or " if is_open else ""
        return (
            f"the API key does not start with {KEY_PREFIX}, and is no token in force: {made_up}use a key made by "
            "`trainhouse keys create NAME`"
        )
    return (
        f"the API key is unknown or revoked (once a key has been made, made-up {KEY_PREFIX} keys no longer work): use "
        "a key made by `trainhouse keys create NAME`"
    )


_ApiKey = Annotated[str | None, Security(APIKeyHeader(name="X-API-Key", auto_error=False))]
"""For OpenAPI: /docs asks for the key and sends it."""


async def current_tenant(request: Request, _: _ApiKey) -> Tenant:
    """Whom the gate has let in."""
    return request.state.tenant


TenantDependency = Annotated[Tenant, Depends(current_tenant)]


async def is_operator(request: Request) -> bool:
    """For routes that take no key, too."""
    return await request.app.state.services.auth.is_operator(presented_key(request), address_of(request))


OperatorDependency = Annotated[bool, Depends(is_operator)]


def address_of(request: Request) -> str:
    return request.client.host if request.client else ""


def presented_key(request: Request) -> str | None:
    """X-API-Key, as the SDK sends it, or else a bearer token, as people type it."""
    if key := request.headers.get("X-API-Key"):
        return key.strip()
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def hash_key(key: str) -> str:
    """sha256 in hex. Keys are 256 random bits, so nothing slower is needed."""
    return sha256(key.encode()).hexdigest()


async def require_keys(config: ServerConfig, store: Store) -> None:
    """Raises ValueError when other machines reach the server and nobody has a key."""
    if config.is_loopback:
        return
    if not (await store.count_keys()).in_force:
        raise ValueError(
            f"host {config.host} can be reached from other machines and no API key is in force: "
            f"make one with `trainhouse keys create NAME {_place_of(config)}`, or listen on 127.0.0.1"
        )


def _place_of(config: ServerConfig) -> str:
    """The flag that leads `trainhouse keys` to the keys of this server. A URL may have a password: it is not shown."""
    if config.database_url is not None:
        return "--database-url URL"
    return f"--state-dir {shlex.quote(str(config.state_dir))}"


async def create_key(
    store: Store, name: str, scopes: tuple[str, ...] | None = None, requests_per_minute: int | None = None
) -> str:
    """A new key of the tenant of that name, who is made if there is none. The key can be shown only now.

    scopes: None = TENANT_SCOPES. requests_per_minute: None = any number. Raises ValueError when it is no name that
    --tenant-weights can say.
    """
    if not name or name != name.strip() or "," in name or "=" in name:
        raise ValueError(
            f"{name!r} cannot be the name of a key: take one without ',' and '=', and without blanks around it, so "
            "that --tenant-weights can name it"
        )
    tenant = await store.find_tenant(name)
    if tenant is None:
        tenant = TenantRecord(f"tenant-{secrets.token_hex(8)}", name, time.time())
        await store.ensure_tenant(tenant)
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    await store.insert_key(tenant.tenant_id, hash_key(key), time.time(), scopes, requests_per_minute)
    return key


@dataclass(frozen=True)
class KeyInfo:
    """What may be shown of a key."""

    key_id: int
    name: str
    created_at: float
    revoked_at: float | None
    scopes: tuple[str, ...] | None
    requests_per_minute: int | None


async def list_keys(store: Store) -> tuple[KeyInfo, ...]:
    names = {tenant.tenant_id: tenant.name for tenant in await store.list_tenants()}
    return tuple(
        KeyInfo(key.key_id, names[key.tenant_id], key.created_at, key.revoked_at, key.scopes, key.requests_per_minute)
        for key in await store.list_keys()
    )


async def revoke_key(store: Store, key_id: int) -> None:
    """Raises ValueError when there is no such key in force."""
    if not await store.revoke_key(key_id, time.time()):
        raise ValueError(f"there is no key {key_id} in force: `trainhouse keys list` shows those there are")

"""Authenticates requests: maps an API key, which may have scopes and a rate limit, to its tenant.

Only hashes of keys are stored. Whether a tenant may see a session, run or checkpoint is decided where that is looked
up.
"""

import asyncio
import hmac
import math
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
from ..config.sections import LimitsSection
from ..config.server_config import ServerConfig
from ..store import ApiKeyRecord, KeyCounts, Store, TenantRecord
from .rate_limits import UNCOUNTED, RateLimits, UnauthenticatedLimits
from .scopes import OPERATOR, SCOPES, TENANT_SCOPES, check_scopes
from .tokens import LIFETIME_SECONDS, Tokens

T = TypeVar("T")

KEY_PREFIX = "tml-"
MADE_UP_PREFIX = "local-"
"""The prefix of tenants of made-up keys, on a server without keys."""
CACHE_SECONDS = 1.0
"""Greatest age of the counts of keys when a request is admitted."""
CONFIRM_SECONDS = 0.05
"""Greatest age of the counts of keys at a second check, while a request is served."""
_MAX_CACHED = 10_000


@dataclass(frozen=True)
class Tenant:
    id: str
    name: str


@dataclass(frozen=True)
class AuthenticatedKey:
    """A tenant and its key; the key is None if an open server accepted a made-up one."""

    tenant: Tenant
    key_hash: str
    key: ApiKeyRecord | None

    @property
    def scopes(self) -> tuple[str, ...]:
        return SCOPES if self.key is None else self.key.scopes or TENANT_SCOPES


class Auth:
    """Maps a key, or a token issued for one, to its tenant.

    A key revoked by another process is refused within CACHE_SECONDS, one revoked here at once.

    loopback: only this machine can reach the server. Then, until the first key is created, the server is open: any
    `tml-` key is accepted and is its own tenant.
    unauthenticated_limits: limit requests with invalid keys, by address.
    """

    def __init__(
        self,
        store: Store,
        loopback: bool,
        clock: Callable[[], float] = time.monotonic,
        unauthenticated_per_minute: int = LimitsSection.unauthenticated_per_minute,
    ) -> None:
        self._store = store
        self.is_loopback = loopback
        self._clock = clock
        self._tokens = Tokens()
        self._rates = RateLimits(clock)
        self.unauthenticated_limits = UnauthenticatedLimits(unauthenticated_per_minute, clock)
        # Valid until the store's counts of keys change. Then both are replaced, so that a look-up that began earlier
        # writes to dicts that are no longer read. Refused keys are separate, so that they cannot evict valid ones.
        self._valid_keys: dict[str, AuthenticatedKey] = {}
        self._invalid_keys: dict[str, None] = {}
        # Keys that have been valid before: they are looked up even while their address is over its limit.
        self._once_valid: dict[str, None] = {}
        self._counts: KeyCounts | None = None
        self._counted_at = -math.inf  # when the query began
        self._counting: asyncio.Task[None] | None = None  # one query serves all requests that wait for it

    async def admit(self, request: Request, route: str) -> AuthenticatedKey:
        """Returns the key of the request.

        Raises:
            RequestError: 401 without a valid key, 429 if the address has sent too many such requests, 403 if the key
                lacks the scope, 429 if the key exceeds its rate.
        """
        known = await self.identify(presented_key(request), address_of(request))
        if known.key is not None:
            if known.key.requests_per_minute is not None and route not in UNCOUNTED:
                self._rates.take(known.key.key_id, known.key.requests_per_minute)
            check_scopes(known.scopes, route)
        return known

    async def identify(self, key: str | None, address: str | None = None) -> AuthenticatedKey:
        """Returns the key, without a look at scopes.

        Args:
            address: that sends it, to limit how many invalid ones it sends.
        Raises:
            RequestError: 401 if it is not valid; 429, without a query to the store, if the address has sent too many.
        """
        known = None
        if key:
            stood_for = None if key.startswith(KEY_PREFIX) else self._tokens.key_hash_of(key)
            may_be_new = bool(stood_for) or key.startswith(KEY_PREFIX)
            known = await self._find(stood_for or hash_key(key), may_be_new, CACHE_SECONDS, address)
        if known is None:
            if address is not None:
                self.unauthenticated_limits.take(address)
            raise self._refusal(key)
        return known

    async def confirm(self, request: Request) -> None:
        """Raises RequestError 401 if the key of an admitted request has been revoked since, the server is no longer
        open, or the request's browser has signed out."""
        admitted = admitted_key(request)
        if await self._find(admitted.key_hash, admitted.key is None, CONFIRM_SECONDS) is None:
            raise self._refusal(KEY_PREFIX)
        browser = getattr(request.state, "browser", None)
        if browser is not None and not request.app.state.services.browsers.is_signed_in(browser):
            raise RequestError("this browser has signed out: sign in again", 401)

    async def authenticate(self, key: str | None) -> Tenant:
        """Returns the key's tenant. Raises RequestError 401."""
        return (await self.identify(key)).tenant

    def token_for(self, known: AuthenticatedKey, seconds: int = LIFETIME_SECONDS) -> str:
        """Returns a token that replaces the key for that long."""
        return self._tokens.issue(known.key_hash, known.tenant.id, known.tenant.name, seconds)

    async def sign_in(self, key: str, address: str, seconds: int) -> str:
        """Returns a token that replaces the key for that long; a token cannot be exchanged for another.

        Raises RequestError 401 and 429 as `identify` does.
        """
        if not key.startswith(KEY_PREFIX):
            self.unauthenticated_limits.take(address)
            raise self._refusal(key)
        return self.token_for(await self.identify(key, address), seconds)

    async def tenant_of(self, key: str) -> Tenant | None:
        """Returns the tenant whose weights the key may read; None if it is not valid or lacks the scope read."""
        known = await self._known(key)
        if known is None or (known.key is not None and "read" not in (known.key.scopes or ("read",))):
            return None
        return known.tenant

    async def is_operator(self, key: str | None, address: str) -> bool:
        """True if the key has the scope operator, or the server is open. Raises RequestError 429 as `identify` does."""
        if not key:
            return await self.is_open()
        known = await self._known(key, address)
        return known is not None and OPERATOR in known.scopes

    async def _known(self, key: str, address: str | None = None) -> AuthenticatedKey | None:
        """Returns the key, or None if it is not valid. Raises RequestError 429 as `identify` does."""
        try:
            return await self.identify(key, address)
        except RequestError as error:
            if error.status != 401:
                raise
            return None

    async def revoke(self, key: ApiKeyRecord) -> None:
        await revoke_key(self._store, key.key_id)
        self._clear_caches()

    def _refusal(self, key: str | None) -> RequestError:
        """Returns the error of a request whose key is missing or not valid."""
        if not key:
            text = "no API key: send the header X-API-Key (or Authorization: Bearer), or set TINKER_API_KEY"
        elif key.startswith(KEY_PREFIX):
            text = (
                f"the API key is unknown or revoked (once a key has been made, made-up {KEY_PREFIX} keys no longer "
                "work): use a key made by `trainhouse keys create NAME`"
            )
        else:
            may_be_made_up = self.is_loopback and self._counts is not None and self._counts.created == 0
            made_up = f"send any that does, such as {KEY_PREFIX}me, as no key was made here yet, or "
            text = (
                f"the API key does not start with {KEY_PREFIX}, and is not a valid token: "
                f"{made_up if may_be_made_up else ''}use a key made by `trainhouse keys create NAME`"
            )
        return RequestError(text, status=401)

    async def _find(
        self, key_hash: str, may_be_new: bool, max_age: float, address: str | None = None
    ) -> AuthenticatedKey | None:
        """Returns the key with this hash, or None if it was not valid `max_age` seconds ago.

        Raises RequestError 429, without a query to the store, if the address has sent too many invalid keys.
        """
        oldest = self._clock() - max_age
        while self._counted_at <= oldest:
            if self._counting is None or self._counting.done():
                self._counting = asyncio.create_task(self._count())
            await asyncio.shield(self._counting)
        in_force, refused = self._valid_keys, self._invalid_keys
        if key_hash in in_force:
            return in_force[key_hash]
        if key_hash in refused:
            return None
        if address is not None and key_hash not in self._once_valid:
            self.unauthenticated_limits.check(address)
        known = await self._ask_store(key_hash, may_be_new)
        if known is not None:
            _cache(in_force, key_hash, known)
            _cache(self._once_valid, key_hash, None)
        else:
            self._once_valid.pop(key_hash, None)
            _cache(refused, key_hash, None)
        return known

    def _clear_caches(self) -> None:
        self._valid_keys, self._invalid_keys = {}, {}

    async def _count(self) -> None:
        """Counts the keys, and clears the caches if one was created or revoked."""
        began_at = self._clock()
        counts = await self._store.keys.count()
        if counts != self._counts:
            self._clear_caches()
        self._counts, self._counted_at = counts, began_at

    async def _ask_store(self, key_hash: str, may_be_new: bool) -> AuthenticatedKey | None:
        record = await self._store.keys.find(key_hash)
        if record is not None and hmac.compare_digest(record.key_hash, key_hash) and record.revoked_at is None:
            tenant = await self._store.tenants.get(record.tenant_id)
            assert tenant is not None
            return AuthenticatedKey(Tenant(tenant.tenant_id, tenant.name), key_hash, record)
        if record is None and may_be_new and await self.is_open():
            name = f"{MADE_UP_PREFIX}{key_hash[:16]}"
            await self._store.tenants.ensure(TenantRecord(name, name, time.time()))
            return AuthenticatedKey(Tenant(name, name), key_hash, None)
        return None

    async def is_open(self) -> bool:
        """True if made-up keys are accepted."""
        if not self.is_loopback or (self._counts is not None and self._counts.created):
            return False  # for ever
        return (await self._store.keys.count()).created == 0


def _cache(cache: dict[str, T], key_hash: str, found: T) -> None:
    """Adds an entry; evicts the oldest ones if the cache is full."""
    while len(cache) >= _MAX_CACHED:
        del cache[next(iter(cache))]
    cache[key_hash] = found


_ApiKey = Annotated[str | None, Security(APIKeyHeader(name="X-API-Key", auto_error=False))]
"""Declares the key in the OpenAPI document, so that /docs prompts for it and sends it."""


async def current_tenant(request: Request, _: _ApiKey) -> Tenant:
    """Returns the tenant of the request, as the gate found it."""
    return admitted_key(request).tenant


TenantDependency = Annotated[Tenant, Depends(current_tenant)]


def admitted_key(request: Request) -> AuthenticatedKey:
    """Returns the key of the request, as the gate found it."""
    return request.state.key


async def is_operator(request: Request) -> bool:
    """True if the request may see data about all tenants; works on routes that need no key."""
    return await request.app.state.services.auth.is_operator(presented_key(request), address_of(request))


OperatorDependency = Annotated[bool, Depends(is_operator)]


def address_of(request: Request) -> str:
    return request.client.host if request.client else ""


def presented_key(request: Request) -> str | None:
    """Returns the request's X-API-Key, which the SDK sends, or else its bearer token."""
    if key := request.headers.get("X-API-Key"):
        return key.strip()
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def hash_key(key: str) -> str:
    """Returns sha256 in hex; keys are 256 random bits, so a slower hash is not needed."""
    return sha256(key.encode()).hexdigest()


async def require_keys(config: ServerConfig, store: Store) -> None:
    """Raises ValueError if other machines can reach the server and no key is valid."""
    if config.is_loopback:
        return
    if not (await store.keys.count()).active:
        raise ValueError(
            f"host {config.network.host} can be reached from other machines and no API key is in force: "
            f"make one with `trainhouse keys create NAME {_state_flag(config)}`, or listen on 127.0.0.1"
        )


def _state_flag(config: ServerConfig) -> str:
    """Returns the flag with which `trainhouse keys` finds this server's keys. Hides a URL: it may have a password."""
    if config.store.database_url is not None:
        return "--database-url URL"
    return f"--state-dir {shlex.quote(str(config.store.state_dir))}"


async def create_key(
    store: Store, name: str, scopes: tuple[str, ...] | None = None, requests_per_minute: int | None = None
) -> str:
    """Creates a key for the tenant of that name, and the tenant if there is none. The key cannot be shown later.

    Args:
        scopes: None means TENANT_SCOPES.
        requests_per_minute: None means unlimited.
    Raises:
        ValueError: --tenant-weights cannot express the name.
    """
    if not name or name != name.strip() or "," in name or "=" in name:
        raise ValueError(
            f"{name!r} cannot be the name of a key: use one without ',' and '=', and without spaces around it, so "
            "that --tenant-weights can name it"
        )
    tenant = await store.tenants.find(name)
    if tenant is None:
        tenant = TenantRecord(f"tenant-{secrets.token_hex(8)}", name, time.time())
        await store.tenants.ensure(tenant)
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    await store.keys.insert(tenant.tenant_id, hash_key(key), time.time(), scopes, requests_per_minute)
    return key


@dataclass(frozen=True)
class KeyInfo:
    """The public properties of a key."""

    key_id: int
    name: str
    created_at: float
    revoked_at: float | None
    scopes: tuple[str, ...] | None
    requests_per_minute: int | None


async def list_keys(store: Store) -> tuple[KeyInfo, ...]:
    names = {tenant.tenant_id: tenant.name for tenant in await store.tenants.list_all()}
    return tuple(
        KeyInfo(key.key_id, names[key.tenant_id], key.created_at, key.revoked_at, key.scopes, key.requests_per_minute)
        for key in await store.keys.list_all()
    )


async def revoke_key(store: Store, key_id: int) -> None:
    """Revokes a key. Raises ValueError if there is no such key, or it is already revoked."""
    if not await store.keys.revoke(key_id, time.time()):
        raise ValueError(f"there is no key {key_id} in force: `trainhouse keys list` shows all keys")

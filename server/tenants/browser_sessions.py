"""Browsers that are signed in to the console: each has a secret in a cookie, which stands for an API key.

They are in memory only: after a restart users sign in again, as clients exchange their keys for new tokens.
"""

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...schemas.errors import RequestError

LIFETIME_SECONDS = 12 * 3600
MAX_PER_TENANT = 50
MAX_SESSIONS = 2000
MAX_STREAMS = 30
"""Pages of a tenant that may show live curves at the same time."""


@dataclass(frozen=True)
class BrowserSession:
    """A signed-in browser.

    name: hash of its secret.
    token: stands for its API key, and is valid as long as the session.
    form_token: what the browser sends with every request that changes something, to show that a page of ours made it.
    """

    name: str
    tenant_id: str
    token: str
    form_token: str
    expires_at: float


class BrowserSessions:
    """Holds the signed-in browsers by the hash of their secret. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, BrowserSession] = {}  # oldest first
        self._num_streams: Counter[str] = Counter()

    def begin(self, tenant_id: str, token: str) -> str:
        """Returns the secret of a new session. If there are too many, of the tenant or in all, the oldest ends."""
        of_tenant = [name for name, one in self._sessions.items() if one.tenant_id == tenant_id]
        for names, most in ((of_tenant, MAX_PER_TENANT), (self._sessions, MAX_SESSIONS)):
            if len(names) >= most:
                del self._sessions[next(iter(names))]
        secret, form_token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        name, expires_at = _name(secret), self._clock() + LIFETIME_SECONDS
        self._sessions[name] = BrowserSession(name, tenant_id, token, form_token, expires_at)
        return secret

    def find(self, secret: str | None) -> BrowserSession | None:
        session = self._sessions.get(_name(secret)) if secret else None
        if session is not None and session.expires_at <= self._clock():
            self.end(secret)
            return None
        return session

    def is_signed_in(self, session: BrowserSession) -> bool:
        """False if the session has ended since it was found."""
        return session.name in self._sessions

    def end(self, secret: str | None) -> None:
        """Ends a session; does nothing if there is none."""
        self._sessions.pop(_name(secret or ""), None)

    @contextmanager
    def streaming(self, tenant_id: str) -> Iterator[None]:
        """Counts a stream of events. Raises RequestError 429 if the tenant has too many."""
        if self._num_streams[tenant_id] >= MAX_STREAMS:
            raise RequestError(f"{MAX_STREAMS} pages show live curves already: close some", status=429)
        self._num_streams[tenant_id] += 1
        try:
            yield
        finally:
            self._num_streams[tenant_id] -= 1


def _name(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()

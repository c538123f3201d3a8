"""Issues short-lived JSON web tokens (HS256) that replace an API key in requests.

Their secret is private to the process: after a restart they are refused, and clients exchange their key again.
"""

import base64
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping

LIFETIME_SECONDS = 3600
_HEADER = {"alg": "HS256", "typ": "JWT"}


class Tokens:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._secret = secrets.token_bytes(32)
        self._clock = clock

    def issue(self, key_hash: str, tenant_id: str, tenant_name: str, seconds: int = LIFETIME_SECONDS) -> str:
        """Returns a token with the key's hash and the claims that the SDK's `whoami` shows."""
        now = int(self._clock())
        claims = {"sub": tenant_id, "org_id": "trainhouse", "email": tenant_name, "key": key_hash}
        signed = f"{_encoded(_HEADER)}.{_encoded(claims | {'iat': now, 'exp': now + seconds})}"
        return f"{signed}.{self._signature(signed)}"

    def key_hash_of(self, token: str) -> str | None:
        """Returns the hash of the token's key, or None if this process did not issue it or it has expired."""
        signed, dot, signature = token.rpartition(".")
        if not dot or not hmac.compare_digest(self._signature(signed).encode(), signature.encode()):
            return None
        claims = _decoded(signed.partition(".")[2])
        return claims["key"] if claims["exp"] > self._clock() else None

    def _signature(self, signed: str) -> str:
        return _base64(hmac.digest(self._secret, signed.encode(), "sha256"))


def _encoded(part: Mapping[str, object]) -> str:
    return _base64(json.dumps(part, separators=(",", ":")).encode())


def _decoded(part: str) -> dict:
    return json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

"""Checks the head of a request before all else: that it is readable, and that it is meant for this server."""

import re
from collections.abc import Collection

from fastapi import Request

from ...schemas.adapters.model_files import is_loopback
from ...schemas.errors import RequestError
from .auth import Auth, address_of

_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::[^.@:]*)?", re.DOTALL)
_OF_PROXIES = frozenset({"via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip", "cdn-loop"})


async def check_head(request: Request, allowed_hosts: Collection[str]) -> None:
    """Raises RequestError if the head is not readable, or not meant for this server.

    A server that listens on a loopback address and has no keys answers only under names that no page of another site
    can have: a site whose name leads to 127.0.0.1 (DNS rebinding) would else use it through its visitors' browsers.
    Such names are loopback addresses, names without a dot, as containers have, and `allowed_hosts`.
    """
    auth: Auth = request.app.state.services.auth
    if not request.scope["query_string"].isascii():
        request.scope["query_string"] = b""  # which the answer could not describe
        auth.unauthenticated_limits.take(address_of(request))
        raise RequestError("the query is not ASCII: percent-encode it, as UTF-8")
    hosts = request.headers.getlist("host") if auth.is_loopback else []
    if all(is_local_host(host, allowed_hosts) for host in hosts) or not await auth.is_open():
        return
    auth.unauthenticated_limits.take(address_of(request))
    raise RequestError(
        f"this server has no keys, so it answers only under loopback names, and not under {hosts[0][:100]!r}: make "
        "a key with `trainhouse keys create NAME`, or start the server with --allowed-host HOST",
        status=403,
    )


def is_local_host(host: str, others: Collection[str] = ()) -> bool:
    """True if no site of the internet can have the name in this Host header, or it is one of the others."""
    if (found := _HOST.fullmatch(host)) is None:
        return False
    name = found[1].strip("[]").lower().rstrip(".")
    return name in others or ("." not in name and ":" not in name) or is_loopback(name) or name.endswith(".localhost")


def is_local_request(request: Request) -> bool:
    """True if a program on this machine sent the request, and no proxy that shows itself has passed it on."""
    if not is_loopback(address_of(request)) or request.scope.get("http_version") == "1.0":
        return False
    if any("forwarded" in name or name in _OF_PROXIES for name in request.headers):
        return False
    return all(map(is_local_host, request.headers.getlist("host")))

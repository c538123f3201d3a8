"""Refuses query parameters that a route does not have, as bodies refuse unknown fields: a list would ignore a limit."""

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant

from ...schemas.errors import UnknownField
from ...schemas.training import describe_unknown
from .bodies import Body


def check_query(request: Request) -> None:
    """Raises UnknownField; routes without a key (probes, signed downloads) take what others append to addresses."""
    if not request.query_params or not hasattr(request.state, "key"):
        return
    route = request.scope["route"]
    known = list(_names(route.dependant))
    unknown = next((name for name in request.query_params if name not in known), None)
    if unknown is None:
        return
    words = describe_unknown(f"the query of {route.path_format}", unknown, known)
    body: Body = request.state.body
    if body.tolerance == "none":
        raise UnknownField(words, False)
    body.ignored.append(words)


def _names(dependant: Dependant) -> Iterator[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for each in dependant.dependencies:
        yield from _names(each)

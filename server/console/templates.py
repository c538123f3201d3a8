"""The console's templates and static files, which a server reads once."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ... import __version__
from .paths import CONSOLE

_HERE = Path(__file__).parent
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}


def render(template: str, **content: object) -> str:
    """Returns a page. All that is filled in is escaped."""
    return _environment().get_template(template).render(**content)


def error_page(visitor: object, status: int, detail: str) -> str:
    """Returns the page of an error, with the visitor's navigation; None for one who is not signed in."""
    return render("error.html", visitor=visitor, status=status, phrase=HTTPStatus(status).phrase, detail=detail)


@cache
def static_files() -> Mapping[str, tuple[bytes, str]]:
    files = [path for path in (_HERE / "static").iterdir() if path.suffix in _TYPES]
    return {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in files}


@cache
def static_version() -> str:
    """Returns a name of all static files together. It is a part of their URLs, in which scripts refer to each other, so
    that browsers may keep what they have."""
    every = sorted(static_files().items())
    return hashlib.sha256(b"".join(name.encode() + content for name, (content, _) in every)).hexdigest()[:12]


def static_url(name: str) -> str:
    assert name in static_files(), f"there is no static file {name}"
    return f"{CONSOLE}/static/{static_version()}/{name}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.globals |= {"static_url": static_url, "version": __version__, "console": CONSOLE}
    environment.filters |= {"bytes": _bytes, "number": _number, "seconds": _seconds, "minute": _minute, "shade": _shade}
    environment.filters["iso"] = lambda at: _moment(at).isoformat()
    return environment


def _bytes(number: float | None) -> str:
    if number is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def _number(number: float | None) -> str:
    return "–" if number is None else f"{number:,.6g}" if isinstance(number, float) else f"{number:,}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _moment(at: datetime | float) -> datetime:
    return at.astimezone(UTC) if isinstance(at, datetime) else datetime.fromtimestamp(at, UTC)


def _minute(at: datetime | float) -> str:
    """Scripts of pages replace it by the local time."""
    return f"{_moment(at):%Y-%m-%d %H:%M} UTC"


def _shade(share: float) -> str:
    """Returns the class of a token by its share of the largest weight, which may be below 0."""
    if share == 0:
        return "read"
    return f"{'up' if share > 0 else 'down'}{min(4, 1 + int(4 * abs(share)))}"

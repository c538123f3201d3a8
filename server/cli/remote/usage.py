"""`trainhouse usage`: what a key has used of its limits."""

from ....schemas.models import Limit
from ..options import new_app
from ..output import print_table, size
from .server import Server, through_server

app = new_app()


@app.command()
@through_server
def usage(server: Server) -> None:
    """Show the limits of the API key and how much of them is in use."""
    with server.client() as service:
        found = service.get_limits()

    def print_text() -> None:
        limits = [(name, limit) for name, limit in found if isinstance(limit, Limit)]
        rows = [(name, _shown(name, limit.used), _shown(name, limit.limit) or "none") for name, limit in limits]
        print(f"tenant {found.tenant}")
        print_table(("", "USED", "LIMIT"), rows)

    server.print(found, print_text)


def _shown(name: str, number: int | None) -> str | None:
    return size(number) if name.endswith("_bytes") else None if number is None else f"{number:,}"

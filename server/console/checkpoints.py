"""Pages of checkpoints; their buttons call the API."""

from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from ..routes.checkpoints import OwnedDependency, external_weights_urls
from ..routes.listing import list_user_checkpoints
from ..routes.services import ServicesDependency
from .paging import PageNumber, Pages
from .paths import CONSOLE
from .visitor import VisitorDependency, page

router = APIRouter(prefix=CONSOLE, include_in_schema=False)

_PER_PAGE = 25


@router.get("/checkpoints")
async def list_checkpoints(
    services: ServicesDependency, visitor: VisitorDependency, number: PageNumber = 1
) -> HTMLResponse:
    listed = await list_user_checkpoints(services, visitor.tenant, _PER_PAGE, _PER_PAGE * (number - 1))
    total = listed.cursor.total_count if listed.cursor else len(listed.checkpoints)
    pages = Pages(f"{CONSOLE}/checkpoints", {}, number, _PER_PAGE, total)
    return page(visitor, "checkpoints.html", checkpoints=listed.checkpoints, pages=pages)


@router.get("/checkpoints/{run_id}/{kind}/{name}")
async def show_checkpoint(
    checkpoint: OwnedDependency, request: Request, services: ServicesDependency, visitor: VisitorDependency
) -> HTMLResponse:
    """Shows a checkpoint with links to its files, which need no key until they expire."""
    signed = await external_weights_urls(checkpoint, request, services)
    files = {name: _path_of(url) for name, url in signed.urls.items()}
    copies = (await services.checkpoints.copies([checkpoint])).get(checkpoint.directory, ())
    content = {"files": files, "files_expire_at": signed.expires, "copies": copies}
    return page(visitor, "checkpoint.html", checkpoint=checkpoint, **content)


def _path_of(url: str) -> str:
    """Returns the URL without the host, so that the link works wherever the page was found."""
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}"

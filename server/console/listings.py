"""Pages of sessions, with their runs and samplers, and of checkpoints, whose buttons call the API."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from ..routes.checkpoints import OwnedDependency, external_weights_urls
from ..routes.examples import SessionIdPath
from ..routes.listing import list_user_checkpoints
from ..routes.services import ServicesDependency
from .paths import CONSOLE
from .visitor import PER_PAGE, PageNumber, Pages, Search, VisitorDependency, offset_of, page

router = APIRouter(prefix=CONSOLE, include_in_schema=False)

_OPEN = {"": None, "open": True, "ended": False}


@router.get("/sessions")
async def list_sessions(
    services: ServicesDependency,
    visitor: VisitorDependency,
    search: Search = "",
    state: Annotated[Literal["", "open", "ended"], Query()] = "",
    number: PageNumber = 1,
) -> HTMLResponse:
    sessions, found = await services.store.sessions.page_of_tenant(
        visitor.tenant.id, offset_of(number), PER_PAGE, search.strip(), _OPEN[state]
    )
    query = {"search": search, "state": state}
    pages = Pages(f"{CONSOLE}/sessions", query, number, found.total_count)
    return page(visitor, "sessions.html", sessions=sessions, search=search, state=state, pages=pages)


@router.get("/sessions/{session_id}")
async def show_session(
    session_id: SessionIdPath, services: ServicesDependency, visitor: VisitorDependency
) -> HTMLResponse:
    session = await services.sessions.get(visitor.tenant, session_id)
    runs = await services.store.runs.list_of_session(session_id)
    samplers = await services.store.samplers.list_of_session(session_id)
    is_open = services.sessions.is_open(session_id)
    return page(visitor, "session.html", session=session, runs=runs, samplers=samplers, is_open=is_open)


@router.get("/checkpoints")
async def list_checkpoints(
    services: ServicesDependency, visitor: VisitorDependency, number: PageNumber = 1
) -> HTMLResponse:
    listed = await list_user_checkpoints(services, visitor.tenant, PER_PAGE, offset_of(number))
    total = listed.cursor.total_count if listed.cursor else len(listed.checkpoints)
    pages = Pages(f"{CONSOLE}/checkpoints", {}, number, total)
    return page(visitor, "checkpoints.html", checkpoints=listed.checkpoints, pages=pages)


@router.get("/checkpoints/{run_id}/{kind}/{name}")
async def show_checkpoint(
    checkpoint: OwnedDependency, request: Request, services: ServicesDependency, visitor: VisitorDependency
) -> HTMLResponse:
    """Shows a checkpoint with links to its files, which need no key until they expire."""
    signed = await external_weights_urls(checkpoint, request, services)
    # Without the host, so that the links work wherever the page was found.
    files = {name: f"{(url := urlsplit(text)).path}?{url.query}" for name, text in signed.urls.items()}
    copies = (await services.checkpoints.copies([checkpoint])).get(checkpoint.directory, ())
    content = {"files": files, "files_expire_at": signed.expires, "copies": copies}
    return page(visitor, "checkpoint.html", checkpoint=checkpoint, **content)

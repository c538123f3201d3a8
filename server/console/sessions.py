"""Pages of sessions: their runs and samplers, and how they ended."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from ..routes.examples import SessionIdPath
from ..routes.services import ServicesDependency
from .paging import PageNumber, Pages, Search
from .paths import CONSOLE
from .visitor import VisitorDependency, page

router = APIRouter(prefix=CONSOLE, include_in_schema=False)

_PER_PAGE = 25
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
        visitor.tenant.id, _PER_PAGE * (number - 1), _PER_PAGE, search.strip(), _OPEN[state]
    )
    query = {"search": search, "state": state}
    pages = Pages(f"{CONSOLE}/sessions", query, number, _PER_PAGE, found.total_count)
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

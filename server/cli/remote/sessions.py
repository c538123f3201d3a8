"""`trainhouse sessions`: lists the sessions of a key, and what is in them."""

from typing import Annotated

import typer

from ..options import new_app
from ..output import print_table
from .runs import Limit, Offset
from .server import Server, through_server

app = new_app("List sessions, and what is in them.")


@app.command("list")
@through_server
def list_sessions(server: Server, limit: Limit = 20, offset: Offset = 0) -> None:
    """List your sessions, the newest first."""
    found = server.ask(lambda rest: rest.list_sessions(limit, offset))
    rows = [(session, found.names.get(session, "")) for session in found.sessions]
    server.print(found, lambda: print_table(("SESSION", "NAME"), rows))


@app.command()
@through_server
def show(server: Server, session: Annotated[str, typer.Argument(metavar="SESSION", help="Id of the session.")]) -> None:
    """Show the training runs and samplers of a session."""
    found = server.ask(lambda rest: rest.get_session(session))
    rows = [("name", found.display_name)] if found.display_name else []
    rows += [("tag", tag) for tag in found.tags or ()]
    rows += (found.user_metadata or {}).items()
    rows += [("run", run) for run in found.training_run_ids]
    rows += [("sampler", sampler) for sampler in found.sampler_ids]
    server.print(found, lambda: print_table(("", ""), rows))

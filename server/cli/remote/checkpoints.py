"""`trainhouse checkpoints`: lists, downloads, publishes and deletes checkpoints."""

from pathlib import Path
from typing import Annotated

import typer

from ..options import new_app
from ..output import print_json, print_table, size, spinner
from .runs import Limit, Offset
from .server import Server, through_server

app = new_app("List, download, publish and delete checkpoints.")

Checkpoint = Annotated[
    str, typer.Argument(metavar="PATH", help="tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME.")
]


@app.command("list")
@through_server
def list_checkpoints(
    server: Server,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Only those of this run.")] = None,
    limit: Limit = 100,
    offset: Offset = 0,
) -> None:
    """List your checkpoints, the newest first; those of one run, the oldest first."""
    found = server.ask(
        lambda rest: rest.list_user_checkpoints(limit, offset) if run is None else rest.list_checkpoints(run)
    )
    rows = [
        (each.tinker_path, each.time, size(each.size_bytes), "public" if each.public else "private", each.expires_at)
        for each in found.checkpoints
    ]
    server.print(found, lambda: print_table(("CHECKPOINT", "SAVED", "SIZE", "READ BY", "EXPIRES"), rows))


@app.command()
@through_server
def show(server: Server, path: Checkpoint) -> None:
    """Show the base model, the role and the shape of a checkpoint."""
    found = server.ask(lambda rest: rest.get_weights_info_by_tinker_path(path))
    rows = [(name, value) for name, value in found.model_dump().items() if value is not None]
    server.print(found, lambda: print_table(("", ""), rows))


@app.command()
@through_server
def download(
    server: Server,
    path: Checkpoint,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="New or empty directory to write.")],
) -> None:
    """Download the files of a checkpoint as they are; `trainhouse export` writes what other programs read."""
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: name a new directory")
    with server.client() as service, spinner(f"downloading {path}") as show:
        files = service.create_rest_client().download_checkpoint(path, directory, on_progress=show).result()
    if server.as_json:
        print_json({"files": [str(file) for file in files]})
    else:
        print("\n".join(map(str, files)))


@app.command()
@through_server
def delete(
    server: Server,
    path: Checkpoint,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a checkpoint and its files immediately."""
    if not yes and not typer.confirm(f"delete {path} and its files?", err=True):
        raise ValueError("nothing was deleted: confirm, or give --yes")
    server.ask(lambda rest: rest.delete_checkpoint_from_tinker_path(path))
    _print_done(server, path, "deleted")


@app.command()
@through_server
def publish(server: Server, path: Checkpoint) -> None:
    """Make a checkpoint readable by every API key of the server."""
    server.ask(lambda rest: rest.publish_checkpoint_from_tinker_path(path))
    _print_done(server, path, "published")


@app.command()
@through_server
def unpublish(server: Server, path: Checkpoint) -> None:
    """Make a published checkpoint private again; copies that others have made are kept."""
    server.ask(lambda rest: rest.unpublish_checkpoint_from_tinker_path(path))
    _print_done(server, path, "private")


@app.command()
@through_server
def ttl(
    server: Server,
    path: Checkpoint,
    seconds: Annotated[
        int | None, typer.Argument(metavar="[SECONDS]", help="From now, an hour to ten years; without it, forever.")
    ] = None,
) -> None:
    """Set when a checkpoint is deleted."""
    server.ask(lambda rest: rest.set_checkpoint_ttl_from_tinker_path(path, seconds))
    _print_done(server, path, "kept" if seconds is None else f"kept for {seconds} seconds")


@app.command()
@through_server
def copy(
    server: Server,
    path: Checkpoint,
    ttl: Annotated[int | None, typer.Option(metavar="SECONDS", help="Delete the copy after this time.")] = None,
) -> None:
    """Copy a published checkpoint or one of your own; the copy is yours."""
    with spinner(f"copying {path}"):
        found = server.ask(lambda rest: rest.copy_weights(path, ttl))
    server.print(found, lambda: print(found.tinker_path))


def _print_done(server: Server, path: str, done: str) -> None:
    if server.as_json:
        print_json({"path": path, "status": done})
    else:
        print(f"{path}: {done}")

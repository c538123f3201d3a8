"""`trainhouse export`: downloads a checkpoint from a running server into a directory that other programs can load."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from ....client.export_checkpoint import log
from ....schemas.adapters.adapter_files import Reader
from ..options import new_app
from ..output import print_json, spinner
from .server import Server, through_server

app = new_app()


@app.command()
@through_server
def export(
    server: Server,
    path: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME."),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="New or empty directory to write.")],
    reader: Annotated[
        Reader | None,
        typer.Option("--for", help="The program that is to load an adapter (peft, but merged if peft refuses it)."),
    ] = None,
    merge_into: Annotated[
        Path | None,
        typer.Option(
            metavar="BASE_DIRECTORY",
            help="Write the base model of this directory with the adapter added to its weights, instead.",
        ),
    ] = None,
) -> None:
    """Download a checkpoint from a running server into a directory that other programs can load."""
    if reader is not None and merge_into is not None:
        raise typer.BadParameter("--merge-into writes no adapter: leave it or --for out")
    log.setLevel(logging.ERROR)  # the note has its warnings
    with server.client() as service, spinner(f"downloading {path}") as show:
        rest = service.create_rest_client()
        exported = rest.export_checkpoint(path, directory, reader, merge_into, on_progress=show).result()
    if server.as_json:
        files = [str(file) for file in exported.files]
        print_json({"directory": str(directory), "files": files, "note": exported.note})
    else:
        print(exported.note)

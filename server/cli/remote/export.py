"""`trainhouse export`: downloads a checkpoint from a running server into a directory that other programs can load."""

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ....client.export_checkpoint import loaded_by, with_transformers
from ....client.merged_model import merge_into_base
from ....client.rest import RestClient
from ....schemas.adapters.adapter_files import CONFIG, DESCRIPTION, Reader
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
        Reader | None, typer.Option("--for", help="The program that is to load an adapter (peft).")
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
    is_new = not directory.exists()
    try:
        if directory.is_dir() and any(directory.iterdir()):
            raise ValueError(f"{directory} is not empty: name a new directory")
        with server.client() as service, spinner(f"downloading {path}"):
            rest = service.create_rest_client()
            if merge_into is None:
                files = rest.export_checkpoint(path, directory, reader or "peft").result()
            else:
                files = _export_merged(rest, path, merge_into, directory)
        note = _note(directory, files, reader or "peft", merge_into is not None)
    except BaseException:
        if is_new:
            with suppress(OSError):  # what was written before stays
                directory.rmdir()
        raise
    if server.as_json:
        print_json({"directory": str(directory), "files": [str(file) for file in files], "note": note})
    else:
        print(note)


def _note(directory: Path, files: list[Path], reader: Reader, is_merged: bool) -> str:
    """Says how to load the files."""
    if is_merged:
        return f"load {directory} with: {with_transformers(directory.resolve())}"
    if all(file.suffix == ".age" for file in files):
        return f"{directory} holds encrypted files: decrypt each with `age --decrypt --identity KEY FILE`"
    description = json.loads((directory / DESCRIPTION).read_text())
    return f"load {directory} with: {loaded_by(description, directory, reader)}"


def _export_merged(rest: RestClient, path: str, base: Path, directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        adapter = Path(scratch)
        rest.export_checkpoint(path, adapter).result()
        if not (adapter / CONFIG).exists():
            raise ValueError(f"{path} is not an adapter that can be read here: export it without --merge-into")
        merge_into_base(adapter, base, directory)
    return sorted(directory.iterdir())

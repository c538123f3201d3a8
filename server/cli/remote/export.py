"""`trainhouse export`: downloads a checkpoint from a running server into a directory that other programs can load."""

import json
import logging
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ....client.export_checkpoint import description_in, loaded_by, log, refusal_by_peft, with_transformers
from ....client.merged_model import merge_into_base
from ....client.rest import RestClient
from ....schemas.adapters.adapter_files import CONFIG, Reader
from ....workers.shapes.model_shape import model_directory
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
    is_new = not directory.exists()
    try:
        if directory.is_dir() and any(directory.iterdir()):
            raise ValueError(f"{directory} is not empty: name a new directory")
        with server.client() as service, spinner(f"downloading {path}"):
            rest = service.create_rest_client()
            if reader is None:
                note = _exported(rest, path, directory, merge_into)
            else:
                rest.export_checkpoint(path, directory, reader).result()
                note = _note(directory, reader)
        files = sorted(directory.iterdir())
    except BaseException:
        if is_new:
            with suppress(OSError):  # what was written before stays
                directory.rmdir()
        raise
    if server.as_json:
        print_json({"directory": str(directory), "files": [str(file) for file in files], "note": note})
    else:
        print(note)


def _exported(rest: RestClient, path: str, directory: Path, merge_into: Path | None) -> str:
    """Writes a checkpoint for peft, or merged if that is asked for or peft refuses the adapter; returns how to load it
    and why it is merged."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        adapter = Path(scratch)
        files = rest.export_checkpoint(path, adapter).result()
        refused = _refusal_by_peft(adapter)
        if merge_into is not None or refused is not None:
            if not (adapter / CONFIG).exists():
                raise ValueError(f"{path} is not an adapter that can be read here: export it without --merge-into")
            if merge_into is not None:
                merge_into_base(adapter, merge_into, directory)
                why = ""
            else:
                _merge_unasked(adapter, directory, str(refused))
                why = f"merged into the base model: {refused}; "
            return f"{why}load {directory} with: {with_transformers(directory.resolve())}"
        for file in files:
            file.rename(directory / file.name)
    return _note(directory, "peft")


def _refusal_by_peft(adapter: Path) -> str | None:
    """Returns why peft does not take an adapter that can be merged instead: not a critic's, whose head no base model
    has."""
    description = description_in(adapter)
    return None if description.get("role") == "critic" else refusal_by_peft(description)


def _merge_unasked(adapter: Path, directory: Path, refused: str) -> None:
    """Merges an adapter that peft refuses into its base model.

    Raises ValueError, which says why it would be merged and what else can be done, if the base model's files on this
    machine do not allow it.
    """
    try:
        merge_into_base(adapter, _base_of(adapter), directory)
    except ValueError as error:
        raise ValueError(
            f"{refused}, so the adapter would be exported merged, and that failed: {error}. Name a directory with the"
            " base model in 16 or 32 bits by --merge-into BASE_DIRECTORY, or export the adapter alone with --for vllm"
            " or --for peft"
        ) from None


def _base_of(adapter: Path) -> Path:
    """Returns the directory of the base model. Raises ValueError if what has its name on this machine is not it."""
    description = description_in(adapter)
    name, architecture = description["base_model"], description.get("architecture")
    if (found := model_directory(name)) is None:
        raise ValueError(f"{name} is not on this machine")
    config = json.loads(file.read_text()) if (file := found / "config.json").exists() else {}
    if architecture not in (config.get("architectures") or ()):
        raise ValueError(f"{found.resolve()} is not the base model: its config.json names no {architecture}")
    return found


def _note(directory: Path, reader: Reader) -> str:
    """Says how to load the files."""
    if not (description := description_in(directory)):
        return f"{directory} holds encrypted files: decrypt each with `age --decrypt --identity KEY FILE`"
    return f"load {directory} with: {loaded_by(description, directory, reader)}"

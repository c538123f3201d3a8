"""`trainhouse import`: uploads an adapter saved by PEFT, from a directory or a URL, to a running server."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ....client.rest import PEFT_FILES
from ..options import new_app
from ..output import spinner
from .server import Server, through_server

app = new_app()


@app.command("import")
@through_server
def import_adapter(
    server: Server,
    source: Annotated[str, typer.Argument(metavar="DIRECTORY_OR_URL", help=f"Contains {' and '.join(PEFT_FILES)}.")],
    base_model: Annotated[
        str | None, typer.Option(help="Base model on the server (the one in adapter_config.json).")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the new checkpoint.")] = "imported",
) -> None:
    """Upload an adapter saved by PEFT, from a directory or a URL, to a running server."""
    with spinner(f"uploading {source}"), _local(source) as directory:
        imported = server.ask(lambda rest: rest.import_adapter(directory, base_model, name))
    server.print(imported, lambda: print(imported.tinker_path))


@contextmanager
def _local(source: str) -> Iterator[Path]:
    if "://" not in source:
        yield Path(source)
        return
    try:
        import fsspec  # an optional dependency of the client
    except ModuleNotFoundError:
        raise ValueError(f"reading {source} needs a package that is not installed: pip install fsspec") from None
    with tempfile.TemporaryDirectory() as directory:
        files, path = fsspec.core.url_to_fs(source)
        for name in PEFT_FILES:
            files.get_file(f"{path.rstrip('/')}/{name}", f"{directory}/{name}")
        yield Path(directory)

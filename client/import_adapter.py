"""`trainhouse import` uploads an adapter saved by PEFT, from a directory or a URL, to a running server."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import TrainhouseError
from .export_checkpoint import INTERRUPTED, RETRY_SECONDS
from .rest import PEFT_FILES
from .service import ServiceClient


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        with (
            _local(options.source) as directory,
            ServiceClient(options.base_url, options.api_key, retry_seconds=RETRY_SECONDS) as service,
        ):
            imported = service.create_rest_client().import_adapter(directory, options.base_model, options.name).result()
    except (TrainhouseError, ValueError, OSError) as error:
        print(f"trainhouse import: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("trainhouse import: interrupted", file=sys.stderr)
        return INTERRUPTED
    print(imported.tinker_path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("trainhouse import", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", metavar="DIRECTORY_OR_URL", help=f"contains {' and '.join(PEFT_FILES)}")
    parser.add_argument("--base-model", help="base model on the server (default: the one in adapter_config.json)")
    parser.add_argument("--name", default="imported", help="name of the new checkpoint (default: %(default)s)")
    parser.add_argument(
        "--base-url", help="URL of the server (default: TRAINHOUSE_BASE_URL, TINKER_BASE_URL or http://127.0.0.1:8000)"
    )
    parser.add_argument("--api-key", help="API key; the environment variable TRAINHOUSE_API_KEY is safer")
    return parser


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


if __name__ == "__main__":
    raise SystemExit(main())
